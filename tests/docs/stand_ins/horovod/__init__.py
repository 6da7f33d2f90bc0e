"""A stand-in for Horovod, which is built from source against MPI and cannot be installed for the tests."""
