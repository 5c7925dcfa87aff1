"""Why flags are not available yet: one sentence per feature, shared by the tables."""

TENSOR_PARALLEL_ENGINE = "the embedded engine runs on one device; engines over several need SGLang"
ROLLOUT_BUFFER = "the external rollout-buffer service is not built yet"
OTHER_ATTENTION = "packed rows run through slime's own variable-length attention"
RELEASE_TRAIN = "re-creating trainer actors between steps is not built yet"
FP16 = "training in float16 needs loss scaling, which is not built yet; use bfloat16"
NIXL = "rollout data travels through Ray's object store only"
OPTIMIZER = "only AdamW is built"
