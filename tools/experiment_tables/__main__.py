"""Write the tables of docs/experiments from the result files."""

from tools.experiment_tables import PAGES, filled

for path in sorted(PAGES.glob("*.md")):
    path.write_text(filled(path.read_text()))
