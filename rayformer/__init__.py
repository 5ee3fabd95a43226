"""rayformer: pretraining of transformers on a Ray cluster that does not stop when GPUs do."""
