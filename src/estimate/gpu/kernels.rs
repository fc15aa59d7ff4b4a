//! Operators whose CPU and GPU kernels use different scratch, or keep different blocks.

use super::super::calls::NONE;
use super::super::inputs::Tensor;
use super::{Editor, Rule, Step};
use neap_model::units::id32;

/// A number that Python passes to an operator becomes a host tensor of at most this many bytes.
const NUMBER: u64 = 8;

/// The workspace that PyTorch gives cuBLASLt by default.
const CUBLASLT_WORKSPACE: u64 = 1 << 20;

impl Editor<'_> {
    /// oneDNN copies input, weight and output into its own layouts; cuDNN makes no such copies.
    pub(super) fn convolution(&mut self, op: u32) -> bool {
        if self.applies(Rule::Convolutions) {
            self.drop_transients(op, Rule::Convolutions);
            let inputs = self.inputs(op);
            if let (Some(input), Some(weight)) = (inputs.tensor(0), inputs.tensor(1)) {
                let time = self.op(op).end;
                self.layout_copies(op, &[input, weight], input, weight, time);
            }
        }
        self.cudnn_allowance(op);
        true
    }

    /// cuDNN needs all tensors of a convolution in one layout: channels last if input or weight has
    /// it. Tensors in another layout are copied. Depthwise convolutions use PyTorch's own kernels.
    fn layout_copies(
        &mut self,
        op: u32,
        wanted: &[&Tensor],
        input: &Tensor,
        weight: &Tensor,
        time: u64,
    ) {
        if input.dims.len() != 4
            || weight.dims.len() != 4
            || (weight.dims[1] == 1 && input.dims[1] > 1)
        {
            return;
        }
        let last = [input, weight].iter().any(|t| is_channels_last(t) && !t.is_contiguous());
        let sizes: Vec<u64> = wanted
            .iter()
            .filter(|t| if last { !is_channels_last(t) } else { !t.is_contiguous() })
            .map(|t| t.bytes())
            .collect();
        self.add_transients_at(time, &sizes, op, Rule::Convolutions);
    }

    /// As [`Self::convolution`]. The bias's gradient is a reduction inside the operator.
    pub(super) fn convolution_backward(&mut self, op: u32) -> bool {
        let inputs = self.inputs(op);
        if self.applies(Rule::Convolutions) {
            self.drop_transients(op, Rule::Convolutions);
            if let (Some(input), Some(weight)) = (inputs.tensor(1), inputs.tensor(2)) {
                let results = self.order_results(op, &[input.bytes(), weight.bytes()]);
                if let Some(gradient) = inputs.tensor(0) {
                    // Between the input's gradient and the weight's.
                    let second = results.get(1).map_or(self.op(op).end, |&l| {
                        self.edited.lives.list[l as usize].start.time
                    });
                    self.layout_copies(op, &[gradient, weight], input, weight, second);
                }
            }
        }
        self.cudnn_allowance(op);
        let wants_bias = inputs.integers(10).is_some_and(|mask| mask.get(2) == Some(&1));
        if let Some(gradient) = inputs.tensor(0).filter(|_| wants_bias) {
            let dims: Vec<usize> = (0..gradient.dims.len()).filter(|&d| d != 1).collect();
            self.reduction_scratch(op, gradient, &dims);
        }
        true
    }

    fn cudnn_allowance(&mut self, op: u32) {
        if self.settings.cudnn_workspace > 0 && self.applies(Rule::Cudnn) {
            self.add_transients(&[self.settings.cudnn_workspace], op, Rule::Cudnn);
        }
    }

    /// The CPU's normalisations allocate per-channel sums and a packed gradient beside their
    /// results.
    pub(super) fn norm(&mut self, op: u32) -> bool {
        if self.applies(Rule::Convolutions) {
            self.drop_transients(op, Rule::Convolutions);
            if self.name(op).ends_with("backward") {
                let inputs = self.inputs(op);
                if let Some(input) = inputs.tensor(1) {
                    self.order_results(op, &[input.bytes()]);
                }
            }
        }
        true
    }

    /// Sorts the surviving results of `op` into the order in which the GPU's kernel allocates them:
    /// those of `sizes` first, then the others.
    fn order_results(&mut self, op: u32, sizes: &[u64]) -> Vec<u32> {
        let mut results: Vec<u32> =
            self.taken(op).into_iter().filter(|&l| !self.is_transient(l, op)).collect();
        let keys: Vec<_> =
            results.iter().map(|&l| self.edited.lives.list[l as usize].start).collect();
        let mut ordered = Vec::with_capacity(results.len());
        for &bytes in sizes {
            if let Some(at) =
                results.iter().position(|&l| self.edited.lives.list[l as usize].bytes == bytes)
            {
                ordered.push(results.remove(at));
            }
        }
        ordered.extend(results);
        for (&life, key) in ordered.iter().zip(keys) {
            self.edited.lives.list[life as usize].start = key;
        }
        ordered
    }

    /// The CPU multiplies by a tensor of random numbers, which backward needs again. The GPU's
    /// fused kernel keeps a mask of one byte for each element.
    pub(super) fn dropout(&mut self, op: u32) -> bool {
        if !self.applies(Rule::Dropout) {
            return false;
        }
        let inputs = self.inputs(op);
        let Some(input) = inputs.tensor(0) else { return false };
        let fused = self
            .calls
            .inside(self.trace, op)
            .iter()
            .any(|&o| self.name(o) == "aten::native_dropout");
        let kept: Vec<u32> =
            self.taken(op).into_iter().filter(|&l| !self.is_transient(l, op)).collect();
        if let [noise, result] = kept[..]
            && !fused
            && [noise, result]
                .iter()
                .all(|&l| self.edited.lives.list[l as usize].bytes == input.bytes())
        {
            let (before, after) = (input.bytes(), input.count());
            self.edited.lives.list[noise as usize].bytes = after;
            let effect = self.effect(Rule::Dropout);
            effect.blocks += 1;
            effect.removed += before.saturating_sub(after);
        }
        false
    }

    /// The GPU multiplies gradient and result before its kernel runs.
    pub(super) fn softmax_backward(&mut self, op: u32) -> bool {
        if self.applies(Rule::Softmax) {
            let inputs = self.inputs(op);
            if let Some(gradient) = inputs.tensor(0) {
                self.add_transients(&[gradient.bytes()], op, Rule::Softmax);
            }
        }
        false
    }

    /// Each thread's first multiplication allocates a workspace for its cuBLAS handle, which is
    /// never freed, after the result's block. The first one that adds a bias uses cuBLASLt, which
    /// has a workspace of its own.
    pub(super) fn multiplication(&mut self, op: u32) -> bool {
        if !self.applies(Rule::Workspaces) {
            return false;
        }
        let mut workspaces = Vec::new();
        let thread = usize::from(self.is_backward(op));
        if !std::mem::replace(&mut self.multiplied[thread], true) {
            workspaces.push(self.settings.class.cublas_workspace());
        }
        if !self.biased
            && self.name(op) == "aten::addmm"
            && self.inputs(op).tensor(0).is_some_and(|bias| bias.dims.len() == 1)
        {
            self.biased = true;
            workspaces.push(CUBLASLT_WORKSPACE);
        }
        for bytes in workspaces {
            let start = self.edited.lives.key(self.op(op).end, 0);
            self.add(bytes, start, None, op, Rule::Workspaces);
        }
        false
    }

    /// Blocks that a kernel frees before it ends are scratch of the CPU's kernel. The rules that
    /// know the GPU's own scratch add it. Numbers never reach the GPU's allocator.
    pub(super) fn scratch_and_numbers(&mut self, steps: &[Step]) {
        for life in 0..id32(self.edited.lives.list.len()) {
            let l = self.edited.lives.list[life as usize];
            if l.dropped || l.start.side != 1 || l.before {
                continue;
            }
            if l.bytes <= NUMBER {
                let from_python = l.op == NONE;
                let in_step =
                    steps.iter().any(|s| s.start <= l.start.time && l.start.time <= s.end);
                let brief = l.op != NONE && self.is_transient(life, self.calls.outermost(l.op));
                if self.applies(Rule::Numbers) && (from_python || in_step || brief) {
                    self.drop(life, Rule::Numbers);
                }
            } else if l.op != NONE
                && self.applies(Rule::Scratch)
                && self.name(l.op).starts_with("aten::")
                && self.is_transient(life, l.op)
            {
                self.drop(life, Rule::Scratch);
            }
        }
    }
}

/// Whether a tensor of four dimensions is packed with its channels innermost.
fn is_channels_last(tensor: &Tensor) -> bool {
    let (Ok([n, c, h, w]), Ok(strides)) =
        (<[u64; 4]>::try_from(&tensor.dims[..]), <[u64; 4]>::try_from(&tensor.strides[..]))
    else {
        return false;
    };
    let packed = Tensor {
        dims: vec![n, h, w, c],
        strides: vec![strides[0], strides[2], strides[3], strides[1]],
        ..Tensor::default()
    };
    packed.is_contiguous()
}
