"""A run folder as one self-contained page: ``page.build(folder)`` writes its report.html."""
