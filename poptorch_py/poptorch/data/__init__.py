"""Combined batches of a process's part of the data."""

from poptorch.data.combined_batches import DataLoader as DataLoader
from poptorch.data.read_ahead import AsynchronousDataAccessor as AsynchronousDataAccessor
