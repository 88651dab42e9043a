"""One module per command; `reelray.cli` lists them."""
