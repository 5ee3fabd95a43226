"""From text to microbatches: sample order, indexed files, tokenizers, corpora and loader."""
