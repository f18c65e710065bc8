"""Programs that Flotilla is compared with, written from their published descriptions."""
