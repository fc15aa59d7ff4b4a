//! Attention by the plain sequence of products ("math"): the blocks that a GPU keeps and frees when
//! it has no fused kernel for the call.

use super::*;

impl Editor<'_> {
    /// Rewrites a call for which the GPU has no fused kernel.
    pub(super) fn as_math(&mut self, op: u32, shape: &Shape, group: &Group) -> bool {
        let kept: Vec<u32> =
            self.taken(op).into_iter().filter(|&l| !self.is_transient(l, op)).collect();
        let Some(&result) =
            kept.first().filter(|&&l| self.edited.lives.list[l as usize].bytes == shape.query())
        else {
            return false;
        };
        for life in self.taken(op) {
            if life != result {
                self.drop(life, Rule::Attention);
            }
        }
        let end = self.op(op).end;
        let released = self.backward_end(group);
        let (query, repeated, scores) = (shape.query(), shape.repeated(), shape.scores());
        let bias = shape.rows * shape.columns;
        let rule = Rule::Attention;
        let key = |e: &mut Self, time: u64| e.edited.lives.key(time, 0);

        // Forward, in the order of PyTorch's code.
        let keep = |e: &mut Self, bytes: u64| {
            let from = key(e, end);
            e.add(
                bytes,
                from,
                released.or(Some(Key { time: end, side: 2, order: u32::MAX })),
                op,
                rule,
            )
        };
        keep(self, query);
        let mask = if shape.causal {
            let (lower, whole) = (key(self, end), key(self, end));
            let (made, gone) = (key(self, end), key(self, end));
            self.add(bias, lower, Some(whole), op, rule);
            self.add(bias, whole, Some(gone), op, rule);
            Some((bias * shape.element, made))
        } else {
            None
        };
        let mut key_copy = None;
        if shape.grouped {
            key_copy = Some(key(self, end));
            keep(self, repeated);
        }
        keep(self, repeated);
        let product = key(self, end);
        keep(self, scores * shape.element);
        let flags = key(self, end);
        let flags_end = key(self, end);
        self.add(scores, flags, Some(flags_end), op, rule);
        let product_end = key(self, end);
        self.add(scores * shape.element, product, Some(product_end), op, rule);
        if shape.dropout {
            keep(self, scores);
            keep(self, scores * shape.element);
        }
        let output = key(self, end);
        if let Some(from) = key_copy {
            let to = key(self, end);
            self.add(repeated, from, Some(to), op, rule);
        }
        if let Some((bytes, from)) = mask {
            let to = key(self, end);
            self.add(bytes, from, Some(to), op, rule);
        }
        // The product lies head by head, and the model copies it row by row. The trace's own block
        // stands for that copy.
        let copied = key(self, end);
        let output_end = key(self, end);
        self.add(query, output, Some(output_end), op, rule);
        self.edited.lives.list[result as usize].start = copied;
        if released.is_some() {
            self.math_backward(op, shape, group);
        }
        true
    }

    fn math_backward(&mut self, call: u32, shape: &Shape, group: &Group) {
        let &[node] = &group.nodes[..] else { return };
        let (time, after) = (self.op(node).start, self.op(node).end);
        // Inputs that only the CPU's fused kernel kept are free once the module that called it
        // returns.
        let called = *self.op(call);
        let returned = self.module_end(call);
        let events: Vec<u32> =
            self.calls.events(self.trace, self.op(node).thread.0, time, after).to_vec();
        for event in events {
            let life = self.edited.lives.of_event[event as usize];
            if life == crate::lives::NO_LIFE || self.trace.memory[event as usize].bytes > 0 {
                continue;
            }
            let l = self.edited.lives.list[life as usize];
            let value_itself = !shape.grouped && l.bytes == shape.repeated();
            if l.start.side == 1 && l.start.time < called.start && !value_itself && !l.before {
                let until = if self.is_cached(life) { self.model_end(call) } else { returned };
                let end = self.edited.lives.key(until, 2);
                self.edited.lives.list[life as usize].end = Some(end);
            }
        }
        let gradients: Vec<u32> = self.taken(node);
        let mut ends = Vec::new();
        for life in gradients {
            let l = self.edited.lives.list[life as usize];
            let outlives = l.end.is_none_or(|k| k.time > after);
            if outlives {
                ends.push((l.bytes, l.end));
            }
            self.drop(life, Rule::Attention);
        }
        let [(query, query_end), (keys, key_end), (values, value_end)] = ends[..] else { return };
        let (whole, scores, each) =
            (shape.query(), shape.scores() * shape.element, shape.repeated());
        let rule = Rule::Attention;
        let mut at = || self.edited.lives.key(time, 0);
        let [value_each, attention, softmax, product, product_end, attention_end] =
            std::array::from_fn(|_| at());
        let [key_each, query_scaled, softmax_end, key_scaled, key_each_end] =
            std::array::from_fn(|_| at());
        let [value_sum, value_each_end, key_sum, key_scaled_end, query_out, query_scaled_end] =
            std::array::from_fn(|_| at());
        self.add(scores, attention, Some(attention_end), node, rule);
        self.add(scores, softmax, Some(softmax_end), node, rule);
        self.add(scores, product, Some(product_end), node, rule);
        self.add(each, key_each, Some(key_each_end), node, rule);
        self.add(whole, query_scaled, Some(query_scaled_end), node, rule);
        if shape.grouped {
            self.add(each, value_each, Some(value_each_end), node, rule);
            self.add(values, value_sum, value_end, node, rule);
            self.add(each, key_scaled, Some(key_scaled_end), node, rule);
            self.add(keys, key_sum, key_end, node, rule);
        } else {
            self.add(each, value_each, value_end, node, rule);
            self.add(each, key_scaled, key_end, node, rule);
        }
        self.add(query, query_out, query_end, node, rule);
    }

    /// Whether a block is a cache of keys or values to which nothing was appended yet.
    fn is_cached(&mut self, life: u32) -> bool {
        let op = self.edited.lives.list[life as usize].op;
        if op == NONE || self.name(op) != "aten::cat" {
            return false;
        }
        let inputs = self.inputs(op);
        let Some(crate::inputs::Input::List(all)) = inputs.list.first() else { return false };
        all.first().is_some_and(|tensor| tensor.count() == 0)
    }
}
