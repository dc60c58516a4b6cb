"""A decoder that has been compared with the module it serves.

The list of supported families cannot foresee every configuration, so a few tokens through both say whether the decoder
computes what the module computes.
"""

import torch
from transformers import PreTrainedModel

from longrein.engines.decoder import Decoder, base_module
from longrein.engines.prefill import logits_alone
from longrein.errors import ModelError

# Largest tolerated mean difference of log-probabilities, over tokens that are at all likely. Rounding stays an order
# below, whichever instructions the processor has.
EXACT = 1e-3
ROUNDED = 0.5
LIKELY = -12.0
# Spread over the vocabulary: the first entries are often control tokens, whose very large activations make rounding
# matter ten times more than in any text.
PROBED_TOKENS = 32


def checked_decoder(module: PreTrainedModel, dtype: torch.dtype) -> Decoder:
    """Build a decoder of ``dtype`` for a module and compare the two.

    Raises:
        ModelError: the architecture is unknown, or the two differ.
    """
    decoder = Decoder(module, dtype)
    module = base_module(module)
    stride = max(1, decoder.shape.vocabulary // (PROBED_TOKENS + 1))
    ids = torch.arange(1, PROBED_TOKENS + 1, device=decoder.shape.device) * stride % decoder.shape.vocabulary
    training = module.training
    module.eval()
    with torch.no_grad():
        theirs = module(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(1)
    module.train(training)
    with torch.inference_mode():
        ours = logits_alone(decoder, ids).float().log_softmax(1)
        differences = (ours - theirs).abs()[theirs > LIKELY]
    exact = dtype == module.dtype == torch.float32
    difference = differences.mean().item()
    if not difference < (EXACT if exact else ROUNDED):
        raise ModelError(
            f"the embedded engine computes {type(module).__name__} differently from transformers: log-probabilities "
            f"differ by {difference:.3g} in the mean. The model has a part that the engine does not know; choose "
            "another model."
        )
    return decoder
