"""An exported model on data of any size: `flotilla predict`."""
