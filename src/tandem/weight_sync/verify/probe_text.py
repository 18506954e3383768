"""The text that engines are asked about: prose, arithmetic, code, other languages, and what nobody would write."""

from __future__ import annotations

PROBE = """\
The quick brown fox counts: one, two, three, four, five. 7 + 8 = 15; 12 * 3 = 36. In the year 1889 a tower was \
finished that was not meant to stay. Why does bread rise? Because yeast eats sugar and breathes out a gas, which \
the dough keeps. def area(r): return 3.14159 * r**2  # of a circle. Ask for the red book, not the blue one; it is \
on the third shelf, behind the lamp.

Question: Mia buys 4 boxes with 6 pencils each and gives 5 pencils to Tom. How many are left? Answer: 4 * 6 = 24 \
and 24 - 5 = 19, so 19 pencils are left.

Water boils at 100 degrees at the level of the sea, and at less on a mountain, since the air presses on it less. \
Sailors once found their way by the stars; now a receiver the size of a coin listens to four satellites and solves \
for where and when it is.

for i in range(10):
    if i % 3 == 0:
        print("fizz", i)
    else:
        total += i ** 2

{"name": "Ada", "born": 1815, "knows": ["algebra", "flutes"], "active": false}

Der Zug nach Basel hat heute zwanzig Minuten Verspätung. Le chat dort sous la table. ¿Dónde está la biblioteca?

She closed the letter without reading the last line, put on her coat and walked down to the harbour, where the \
boats knocked against each other in the dark. Nobody had lit the lamp. "You are late," said the old man. "I am \
never late," she answered, "I only arrive when it is over."

If x + 3y = 11 and x - y = 3, then 4y = 8, hence y = 2 and x = 5. The derivative of sin(x) * exp(2x) is exp(2x) * \
(cos(x) + 2 sin(x)). A triangle with sides 3, 4 and 5 has an area of 6.

Dear all, the meeting on Thursday moves to 14:30 in room B12; please bring the figures of the third quarter, and \
tell Jonas in case you cannot come. Best regards, K. Lindqvist

Rinse the lentils, cover them with cold water, add a bay leaf and a pinch of salt, and let them simmer for 25 \
minutes. Meanwhile chop two onions, fry them in butter until they are brown, and stir in a spoon of vinegar.

The court held that the contract was void, because neither party had understood what the other meant by \
"delivery". zxqv 8841-kk ### ~~ lorem 0x7f3a ipsum <td class="a">&nbsp;</td>
"""
"""About 700 tokens of a large vocabulary; its beginning is what an engine is asked after every publish."""
