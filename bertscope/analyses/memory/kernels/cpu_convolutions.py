"""Temporary memory of convolutions on the CPU.

oneDNN lays out input, weight and gradients anew, in blocks of 16 channels for AVX-512 and of 8 otherwise, computes a
blocked output, and copies it to the layout of torch. A tensor in blocks has the bytes of one whose channels are
rounded up to full blocks. Threads that share the gradient of a weight have a copy of it each. The bytes are exact for
AVX-512 and up to 2 threads in fp32, and in bf16 for at most 3 inputs, as images have. With more threads, AVX2 or other
convolutions in 16 bits the scratchpads of some kernels differ.

Sources: the order of the copies is that of aten/src/ATen/native/mkldnn/Conv.cpp in torch 2.13; the layouts and the
scratchpads are those of oneDNN 3.12, src/cpu/x64: jit_avx512_common_conv_kernel.cpp (init_conf),
jit_avx512_core_bf16_conv_kernel.cpp (init_scratchpad, balance),
jit_avx512_common_1x1_convolution.hpp (reduce to unit stride), jit_brgemm_conv_bwd_utils.cpp (init_scratchpad),
jit_uni_dw_conv_kernel_utils.cpp, and src/cpu/gemm_convolution_utils.cpp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from bertscope.torch_access import convolution_backend, has_bf16_products, torch

_ONEDNN = ("Mkldnn", "MkldnnTranspose")
_PAGE_BYTES, _LINE_BYTES = 4096, 64  # to which oneDNN aligns parts of a scratchpad
_BATCH_ELEMENT_BYTES = 24  # sizeof(brgemm_batch_element_t)
_LONGEST_ROW, _LONGEST_BF16_ROW = 14, 24  # of a kernel whose weight's gradient is computed without im2col
_FEW = 8  # channels of a block of AVX2's kernel, which takes inputs that are less than a block of 16
_LEAST_OUTER = 512  # output elements of a thread from which the product of im2col itself uses all threads
_FP32_BYTES, _PART_BYTES = 4, 128  # of a sum; to which parts are aligned
_BARRIER_BYTES = 2 * _PAGE_BYTES + 2 * _LINE_BYTES  # of threads that add up the gradients of their images
_REDUCER_BYTES = 3 * _PAGE_BYTES  # of cpu_reducer.cpp, besides the sums
_WEIGHT_COST, _TOLERATED, _INPUT_COST = 8, 1.1, 4  # of a split among threads: `balance` of both kernels


def convolution_scratch_bytes(args: Any) -> int:
    """Return the bytes that `aten.convolution` allocates in addition to its result, by its arguments.

    A transposed convolution runs the gradient of the convolution that maps its result to its input.
    """
    given, weight, bias, *settings = args
    backend = convolution_backend(given, weight, bias, settings)
    transposed, groups = settings[3], settings[5]
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    found = _Convolution.of(given, weight, (given.shape[0], outputs, *_output_sizes(given, weight, settings)), settings)
    copied = _contiguous_bytes(given, found)
    if backend not in _ONEDNN:
        return copied + (found.columns_bytes if backend.startswith("Slow") else 0)
    return copied + (found.backward_bytes(True, False, False) if transposed else found.forward_bytes)


def convolution_backward_scratch_bytes(args: Any) -> int:
    """Return the bytes that `aten.convolution_backward` allocates in addition to its results, by its arguments."""
    gradient, given, weight, bias_sizes, *settings, (of_input, of_weight, of_bias) = args
    backend = convolution_backend(given, weight, None, settings, bias_sizes)
    found = _Convolution.of(given, weight, gradient.shape, settings)
    copied = _contiguous_bytes(given, found) + _contiguous_bytes(gradient, found)
    if backend not in _ONEDNN:
        return copied + (found.columns_bytes if backend.startswith("Slow") else 0)
    if not settings[3]:
        return copied + found.backward_bytes(of_input, of_weight, of_bias)
    return copied + max(found.forward_bytes if of_input else 0, found.backward_bytes(False, of_weight, of_bias))


def _output_sizes(given: Any, weight: Any, settings: Any) -> list[int]:
    """Return the sizes of the result after batch and channels."""
    stride, padding, dilation, transposed, output_padding, _ = settings
    sizes = []
    for place, (size, taps) in enumerate(zip(given.shape[2:], weight.shape[2:], strict=True)):
        step, pad, apart, more = (each[place % len(each)] for each in (stride, padding, dilation, output_padding))
        reach = apart * (taps - 1) + 1
        sizes.append((size - 1) * step - 2 * pad + reach + more if transposed else (size + 2 * pad - reach) // step + 1)
    return sizes


def _contiguous_bytes(tensor: Any, found: "_Convolution") -> int:
    """Return the bytes of a copy in the layout of the convolution, if the tensor has another one."""
    layout = torch.contiguous_format
    if found.is_channels_last:
        layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return 0 if tensor.is_contiguous(memory_format=layout) else tensor.numel() * tensor.itemsize


@dataclass(frozen=True)
class _Convolution:
    """A convolution; `taps` are the elements of its kernel for one pair of channels, pixels those of one image."""

    batch: int
    inputs: int  # channels
    outputs: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    sizes: tuple[int, ...]  # of the input after the channels
    output_sizes: tuple[int, ...]
    is_channels_last: bool
    itemsize: int
    block: int  # channels
    threads: int

    @classmethod
    def of(cls, given: Any, weight: Any, result: Sequence[int], settings: Any) -> "_Convolution":
        """Return the convolution of an input with a weight; a transposed one with input and result exchanged."""
        stride, _, _, transposed, _, groups = settings
        kernel = tuple(weight.shape[2:])
        shape, output_shape = (result, given.shape) if transposed else (given.shape, result)
        return cls(
            batch=shape[0], inputs=shape[1], outputs=output_shape[1], groups=groups, kernel=kernel,
            stride=tuple(stride) * (len(kernel) // len(stride)), sizes=tuple(shape[2:]),
            output_sizes=tuple(output_shape[2:]), itemsize=given.itemsize,
            is_channels_last=_is_channels_last(given) or _is_channels_last(weight),
            block=16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8,
            threads=torch.get_num_threads(),
        )  # fmt: skip

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.inputs == self.outputs > 1

    @property
    def is_strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def input_bytes(self) -> int:
        return self.itemsize * self.batch * self.inputs * prod(self.sizes)

    @property
    def output_bytes(self) -> int:
        return self.itemsize * self.batch * self.outputs * prod(self.output_sizes)

    @property
    def weight_bytes(self) -> int:
        return self.itemsize * self.outputs * self.inputs // self.groups * self.taps

    @property
    def bias_bytes(self) -> int:
        return self.itemsize * self.outputs

    def _blocked(self, block: int) -> tuple[int, int, int]:
        """Return the bytes of input, weight and output in blocks; groups are not padded, so none may be cut."""
        inputs, outputs = _rounded(self.inputs, block), _rounded(self.outputs, block)
        pairs = inputs if self.is_depthwise else inputs * outputs // self.groups
        return (
            self.itemsize * self.batch * inputs * prod(self.sizes),
            self.itemsize * pairs * self.taps,
            self.itemsize * self.batch * outputs * prod(self.output_sizes),
        )

    def _group_block(self) -> int:
        """Return the channels of a block: fewer if a group has no full block, 0 if not even 4."""
        if self.groups == 1 or self.is_depthwise:
            return self.block
        each = self.inputs // self.groups, self.outputs // self.groups
        return next((block for block in (16, 8, 4) if block <= self.block and not any(n % block for n in each)), 0)

    @property
    def columns_bytes(self) -> int:
        """Return the bytes of the columns that torch's own kernel multiplies; a 1 x 1 kernel needs none."""
        if self.taps == 1 and not self.is_strided:
            return 0
        return self.itemsize * self.batch * self.inputs // self.groups * self.taps * prod(self.output_sizes)

    def _unit_stride_bytes(self, given: int) -> int:
        """Return the bytes of the elements, for each thread one image, that a strided 1 x 1 kernel reads."""
        if self.taps > 1 or not self.is_strided:
            return 0
        return self.threads * given // self.batch // prod(self.sizes) * prod(self.output_sizes) + 2 * _LINE_BYTES

    @property
    def forward_bytes(self) -> int:
        """Return the most bytes of the copies while the result exists."""
        block = self._group_block()
        given, weight, result = self._blocked(block or 1)
        if self.is_channels_last:
            if self.is_depthwise:
                return weight
            copied = self.weight_bytes if self.taps > 1 else 0
            return copied + self._unpadded_weight_bytes(block) + self._batch_bytes
        if not block:
            return max(self.threads * self._image_columns_bytes + 2 * _LINE_BYTES, self.output_bytes)
        if self._has_few_inputs:  # it reads the layout of torch
            given, weight = 0, self._paired_weight_bytes
        scratch = self._unit_stride_bytes(given) + self._padded_bias_bytes(block)
        return max(scratch + given + weight + result - self.output_bytes, result)

    @property
    def _batch_bytes(self) -> int:
        """Return the scratchpad of a product with channels last: for each thread the list of its blocks."""
        return self.threads * (_PAGE_BYTES + _BATCH_ELEMENT_BYTES) + _PAGE_BYTES

    def _unpadded_weight_bytes(self, block: int) -> int:
        """Return the bytes of the weight with full blocks of outputs only."""
        return self.weight_bytes // self.outputs * _rounded(self.outputs, block)

    @property
    def _paired_weight_bytes(self) -> int:
        """Return the bytes of the weight with full blocks of outputs and, in 16 bits, full pairs of inputs."""
        pairs = _rounded(self.inputs, _FP32_BYTES // self.itemsize)
        return self._unpadded_weight_bytes(self.block) // self.inputs * pairs

    def _padded_bias_bytes(self, block: int) -> int:
        return self.itemsize * _rounded(self.outputs, block) + 2 * _LINE_BYTES if self.outputs % block else 0

    @property
    def _image_columns_bytes(self) -> int:
        """Return the bytes of oneDNN's columns of one image."""
        return self.itemsize * self.inputs // self.groups * self.taps * prod(self.output_sizes[-2:])

    @property
    def im2col_bytes(self) -> int:
        """Return the bytes of the columns and of sums of the weight, once for each thread or for all.

        The sums have 4 times the bytes that they need: their bytes are booked as a number of floats.
        """
        is_outer = prod(self.output_sizes) // self.threads < _LEAST_OUTER and (self.batch > 1 or self.groups > 2)
        each = self._image_columns_bytes + 4 * self.weight_bytes
        return (self.threads if is_outer else 1) * each + 4 * _LINE_BYTES

    def backward_bytes(self, of_input: bool, of_weight: bool, of_bias: bool) -> int:
        """Return the most bytes of the copies in addition to the gradients: of the input first, then of the weight."""
        first = self._input_gradient_bytes() if of_input else 0
        then = self._weight_gradient_bytes(self.bias_bytes if of_bias else 0) if of_weight or of_bias else 0
        known = self.input_bytes if of_input else 0
        later = (self.weight_bytes if of_weight else 0) + (self.bias_bytes if of_bias else 0)
        copied = self.weight_bytes if self.is_channels_last and not self.is_depthwise and self.taps > 1 else 0
        return copied + max(first - known - later, then - later, 0)

    def _input_gradient_bytes(self) -> int:
        """Return the bytes while the gradient of the input is computed, that gradient included."""
        given, weight, result = self._blocked(self._group_block() or 1)
        if self.is_strided and self.groups == 1:  # a product with channels last, whose result is copied twice
            rounded = _rounded(self.inputs, self.block if self.inputs <= self.block else 2 * self.block)
            weight = self.weight_bytes // self.inputs * rounded
            reached = zip(self.output_sizes, self.kernel, self.stride, strict=True)
            read = self.outputs * prod(size + (taps - 1) // step for size, taps, step in reached)
            pages = self.itemsize * _rounded(read, _PAGE_BYTES) + 2 * _PAGE_BYTES
            scratch = self.threads * (pages + _BATCH_ELEMENT_BYTES) + 3 * _PAGE_BYTES
            if self.is_channels_last:
                return weight + scratch + self.input_bytes
            copies = 3 if self.inputs > 1 else 2
            return max(self.output_bytes + weight + self.input_bytes + scratch, copies * self.input_bytes)
        if self.is_channels_last:
            scratch = 0 if self.is_depthwise else self._batch_bytes + 2 * _LINE_BYTES
            return weight + self.input_bytes + scratch
        return max(given + weight + result, given + self.input_bytes)

    def _weight_gradient_bytes(self, bias: int) -> int:
        """Return the bytes while the gradient of the weight is computed, those gradients included."""
        block, weights = self._weight_gradient_block(), bias + self.weight_bytes
        if not block and not self.is_channels_last:
            columns = self.im2col_bytes
            if self.itemsize < _FP32_BYTES:  # sums of 16 bits are kept in fp32 too
                columns += _FP32_BYTES * self.weight_bytes + _PART_BYTES
                columns += _FP32_BYTES // self.itemsize * bias + _PART_BYTES if bias else 0
            return self.weight_bytes + max(columns + bias, bias + weights)
        given, weight, result = self._blocked(block or 1)
        if not block:  # the kernel for groups: each has a block of inputs and one of outputs
            weight = self.itemsize * self.groups * self.block**2 * self.taps
        elif self._has_few_inputs and (self.is_channels_last or self.inputs <= 3):  # it reads the layout of torch
            given, weight = 0, self._unpadded_weight_bytes(block)
        scratch = self._unit_stride_bytes(given) + self._sums_bytes(block or self.block, weight, bias)
        if self.is_channels_last:
            return weight + bias + max(scratch, weights + self.weight_bytes)
        return max(given + result + weight + scratch + bias, weight + bias + weights)

    @property
    def _has_few_inputs(self) -> bool:
        """Return True if the inputs are less than a block, for which a kernel of 1 x 1 has no case of its own."""
        return self.groups == 1 and self.inputs < self.block and self.taps > 1

    @property
    def _is_of_bf16_images(self) -> bool:
        return self.itemsize < _FP32_BYTES and self._has_few_inputs and self.inputs <= 3 and has_bf16_products()

    def _weight_gradient_block(self) -> int:
        """Return the channels of a block of the kernel for the weight's gradient; 0 if it has none: im2col."""
        if self.is_depthwise:
            fits = all(size >= taps for size, taps in zip(self.sizes, self.kernel, strict=True))
            return self.block if self.kernel[-1] <= 3 and fits else 0
        if self.is_channels_last:
            return self.block
        if self._is_of_bf16_images:
            return self.block if self.kernel[-1] <= _LONGEST_BF16_ROW and self.outputs % self.block == 0 else 0
        if self.kernel[-1] > _LONGEST_ROW:
            return 0
        if self.groups > 1:
            return self.block if self._group_block() == self.block else 0
        if self._has_few_inputs and self.inputs > 3:
            return _FEW if len(self.kernel) < 3 else 0
        return self.block

    def _sums_bytes(self, block: int, weight: int, bias: int) -> int:
        """Return the bytes of the sums of threads that share the gradients of weight and bias."""
        if self.is_depthwise:
            return 0
        if self._is_of_bf16_images and not self.is_channels_last:
            return self._bf16_sums_bytes(weight + bias)
        outputs, inputs = -(-self.outputs // block), -(-self.inputs // self.groups // block)
        sums = self._padded_bias_bytes(block) if bias else 0
        if block < self.block:  # the kernel for AVX2, whose threads first take blocks, and then images
            sums += weight + _REDUCER_BYTES if outputs * inputs < self.threads else 0
        elif (sharing := self._image_threads(outputs, inputs)) > 1:
            sums += (sharing - 1) * (weight + (self.taps > 1) * self.itemsize * outputs * block) + _BARRIER_BYTES
        if bias and outputs < self.threads and self.batch > 1:
            sums += self.itemsize * block + _REDUCER_BYTES
        return sums

    def _bf16_sums_bytes(self, sums: int) -> int:
        """Return the bytes of sums in fp32, for each group of threads that share images, and of rows padded to pairs.

        `sums` are the bytes of the gradients of weight and bias. Threads share images, and outputs of each.
        """
        blocks, units = self.outputs // self.block, self.batch * prod(self.output_sizes[:-1][:1])
        result = self.output_bytes // self.output_sizes[-1] * _rounded(self.output_sizes[-1], 2)
        balance = (result + self.input_bytes) / self.weight_bytes / 4
        given = (_INPUT_COST if balance < 1 else 1) * self.input_bytes / prod(self.stride)

        def cost(split: tuple[int, int]) -> float:
            """Return the bytes that a thread reads and writes, weighted by oneDNN."""
            part = -(-blocks // split[1])
            share = -(-units // split[0]) / units
            return share * (given + part * result) + max(balance, 1) * part / blocks * self.weight_bytes

        most = min(self.threads, units)
        splits = [(n, m) for n in range(most, 0, -1) for m in range(min(self.threads // n, blocks), 0, -1)]
        groups, others = min(splits, key=cost)
        if self.threads // 2 < groups:
            groups = most
        barriers = 2 + (groups + 1 if others > 1 else 0)
        return groups * (result // self.batch + 2 * sums) + barriers * _PAGE_BYTES + 3 * _PART_BYTES + _FP32_BYTES

    def _image_threads(self, outputs: int, inputs: int) -> int:
        """Return the threads that share a gradient: the most that read little more than in the best split.

        `outputs` and `inputs` are the blocks, which threads share first.
        """
        if self.threads <= self.groups:
            return 1
        given, weight, result = self._blocked(self.block)
        threads = self.threads // self.groups
        costs: dict[int, float] = {}
        for images in range(1, min(threads, self.batch) + 1):
            for first in range(1, min(threads // images, outputs) + 1):
                then = min(threads // images // first, inputs)
                cost = given / then / images / prod(self.stride) + result / first / images
                cost += _WEIGHT_COST * weight / first / then
                costs[images] = min(cost, costs.get(images, cost))
        return max(images for images, cost in costs.items() if cost < _TOLERATED * min(costs.values()))


def _is_channels_last(tensor: Any) -> bool:
    """Return True if torch takes the strides of a tensor for channels last, and not for its usual layout."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
