"""Parts of a model that a program gives names and virtual IPUs: they count the stages of a pipeline."""
