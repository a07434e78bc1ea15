"""Reports: described once as blocks, drawn in the terminal and as one self-contained HTML page."""
