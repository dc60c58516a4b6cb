"""The probe measures what is open and leaves alone what is fixed."""

import os

import pytest
import torch
from transformers import PreTrainedModel

from longrein.engines import probe
from longrein.learning.precision import choose_precision


def test_what_is_fixed_is_taken(module: PreTrainedModel) -> None:
    choice = probe.choose(module, "bfloat16", 3)
    assert (choice.dtype, choice.decode_threads, choice.measured) == (torch.bfloat16, 3, ())
    assert choice.prefill_threads >= 3


def test_dtype_is_measured(module: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "bfloat16_may_pay", lambda device: True)
    before = torch.get_num_threads()
    choice = probe.choose(module, "auto", 1)
    assert torch.get_num_threads() == before
    assert {m.dtype for m in choice.measured} == {"float32", "bfloat16"}
    assert all(m.prefill > 0 and m.decode > 0 for m in choice.measured)
    assert choice.dtype in (torch.float32, torch.bfloat16)
    assert choice.decode_threads == 1


def test_a_processor_without_bfloat16_is_not_asked_twice(
    module: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {torch.float32: 0.001, torch.bfloat16: 0.1}
    monkeypatch.setattr(probe, "_product_seconds", lambda device, dtype: slow[dtype])
    choice = probe.choose(module, "auto", "auto")
    assert choice.dtype == torch.float32
    assert "bfloat16" not in {m.dtype for m in choice.measured}
    assert choose_precision(module, "auto") == torch.float32
    assert choose_precision(module, "bfloat16") == torch.bfloat16


def test_threads_are_bounded_by_the_cores(module: PreTrainedModel) -> None:
    choice = probe.choose(module, "float32", "auto")
    assert choice.dtype == torch.float32
    assert 1 <= choice.decode_threads <= choice.prefill_threads == probe.usable_threads()


def test_spinning_threads_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert probe.usable_threads() == 1
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert probe.usable_threads() == len(os.sched_getaffinity(0))
