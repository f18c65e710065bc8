"""Programs that Flotilla is compared with, written after their published descriptions."""
