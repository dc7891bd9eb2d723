"""The time of a forward pass and a training step of bertscope's BERT relative to transformers' BERT.

    python benchmarks/speed.py [--runs N] [--sizes 8x128,2x512] [--layers N]

Both have the same weights and inputs and run in turns, in alternating order. The ratio is computed for each pair, so
that changes in the machine's speed affect both equally. A ratio of at most 1.00 means not slower than transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

import bertscope

transformers.logging.set_verbosity_error()


def models(attention: str, layers: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Build BertForMaskedLM of both libraries, base size, with the same weights."""
    reference_config = transformers.BertConfig(num_hidden_layers=layers, attn_implementation=attention)
    reference = transformers.BertForMaskedLM(reference_config)
    config = bertscope.BertConfig(num_hidden_layers=layers, attn_implementation=attention)
    own = bertscope.BertForMaskedLM(config)
    own.load_state_dict(reference.state_dict())
    return own, reference


def seconds(model: torch.nn.Module, inputs: dict[str, torch.Tensor], training: bool) -> float:
    """Time one forward pass in eval mode, or one forward and backward pass in train mode."""
    start = time.perf_counter()
    if training:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    else:
        with torch.no_grad():
            model(**inputs)
    elapsed = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return elapsed


def ratios(own: torch.nn.Module, reference: torch.nn.Module, inputs: dict, training: bool, runs: int) -> list[float]:
    """Return the ratio of bertscope to transformers for each pair."""
    found = []
    for run in range(runs + 1):
        order = (own, reference) if run % 2 else (reference, own)
        taken = {id(model): seconds(model, inputs, training) for model in order}
        if run:  # the first pair is a warm-up
            found.append(taken[id(own)] / taken[id(reference)])
    return found


def main() -> None:
    """Print a line for each kernel, size and mode: the median ratio and its middle half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--sizes", default="8x128,2x512", help="batch x sequence")
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"{'kernel':8}{'size':>8}  {'mask':8}{'mode':10}{'ratio':>7}   middle half ({options.runs} pairs)")
    for attention in ("eager", "sdpa"):
        own, reference = models(attention, options.layers)
        for size in options.sizes.split(","):
            batch, length = map(int, size.split("x"))
            ids = torch.randint(1, 30522, (batch, length))
            padding = torch.ones_like(ids)
            padding[:, length * 3 // 4 :] = 0
            for mask, inputs in (
                ("none", {"input_ids": ids}),
                ("padded", {"input_ids": ids, "attention_mask": padding}),
            ):
                for training in (False, True):
                    own.train(training), reference.train(training)
                    found = ratios(own, reference, inputs, training, options.runs)
                    low, median, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
                    mode = "training" if training else "forward"
                    print(
                        f"{attention:8}{size:>8}  {mask:8}{mode:10}{median:7.3f}   {low:.3f} to {high:.3f}", flush=True
                    )


if __name__ == "__main__":
    main()
