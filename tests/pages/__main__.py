"""Write the generated pages of docs/: `python -m tests.pages`."""

from tests.pages.reference import pages
from tests.ranks import CHECKOUT

for path, text in pages().items():
    (CHECKOUT / path).write_text(text)
