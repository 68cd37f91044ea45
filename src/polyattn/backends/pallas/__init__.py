"""Our attention kernel for GPUs and TPUs in Pallas: one text, lowered by Triton or by Mosaic."""
