"""One self-contained HTML page from the JSON that the other commands write; it reads that JSON and nothing else."""
