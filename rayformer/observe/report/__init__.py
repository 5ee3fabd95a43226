"""report.html: one page, complete in itself, that shows how a run went. Made from the files of the run's folder."""
