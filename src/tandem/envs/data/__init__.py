"""What environments share: rows of files and of the hub, and which of them are held out."""
