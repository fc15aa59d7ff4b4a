//! Scaled dot-product attention: its extents and options, checked once for every backend.

use super::KernelError;
use super::arguments::{
    flag, floating, maybe_number, maybe_tensor, number_or, output, result, tensor,
};
use super::error::{invalid, unsupported};
use super::random::Random;
use super::shapes::{broadcast, same_shape};
use super::view::{Call, View};
use crate::job::Arg;

/// Queries (batch, heads, queries, width), keys (batch, key heads, keys, width) and values (batch,
/// value heads, keys, value width), and how they are combined.
pub struct Attention<'a> {
    /// Queries, keys and values.
    pub operands: [&'a View; 3],
    /// Samples.
    pub batch: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Rows of the queries.
    pub queries: usize,
    /// Rows of the keys and values.
    pub keys: usize,
    /// Columns of the queries and keys.
    pub width: usize,
    /// Columns of the values.
    pub value_width: usize,
    /// Query heads for each head of keys and of values.
    pub group: [usize; 2],
    /// Factor of the products.
    pub scale: f32,
    /// Each query sees the keys up to its own place only.
    pub causal: bool,
    /// Probability of dropping an element of the attention matrix.
    pub share: f64,
    /// What is added to the products, and its strides when broadcast.
    pub bias: Option<(&'a View, Vec<usize>)>,
    /// What is dropped.
    pub random: Random,
}

/// Where an operator has its options.
struct Places {
    bias: Option<usize>,
    share: usize,
    causal: usize,
    scale: usize,
}

fn matrices(view: &View) -> Result<&View, KernelError> {
    if view.shape.len() == 4 {
        floating(view)
    } else {
        Err(unsupported!(
            "attention over a tensor of shape {:?}, not of four dimensions",
            view.shape
        ))
    }
}

impl<'a> Attention<'a> {
    fn new(call: &'a Call<'_>, first: usize, places: &Places) -> Result<Self, KernelError> {
        let operands = [tensor(call, first)?, tensor(call, first + 1)?, tensor(call, first + 2)?];
        let [q, k, v] = operands;
        let fail =
            || invalid!("attention of shapes {:?}, {:?} and {:?}", q.shape, k.shape, v.shape);
        for view in operands {
            matrices(view)?;
        }
        let (&[batch, heads, queries, width], &[kb, kh, keys, kw], &[vb, vh, vk, value_width]) =
            (&q.shape[..], &k.shape[..], &v.shape[..])
        else {
            return Err(fail());
        };
        let divides = |part: usize| part > 0 && heads % part == 0;
        if kb != batch
            || vb != batch
            || vk != keys
            || kw != width
            || heads > 0 && !(divides(kh) && divides(vh))
        {
            return Err(fail());
        }
        // A recorded scale has six decimals; the usual one is known exactly.
        let usual = 1.0 / (width.max(1) as f64).sqrt();
        let scale = maybe_number(call, places.scale)?.filter(|s| (s - usual).abs() > 6e-7);
        let bias = places.bias.map(|at| maybe_tensor(call, at)).transpose()?.flatten();
        let bias = bias
            .map(|b| broadcast(b, &[batch, heads, queries, keys]).map(|s| (b, s)))
            .transpose()?;
        Ok(Self {
            operands,
            batch,
            heads,
            queries,
            keys,
            width,
            value_width,
            group: [heads / kh.max(1), heads / vh.max(1)].map(|n| n.max(1)),
            scale: scale.unwrap_or(usual) as f32,
            causal: flag(call, places.causal)?,
            share: number_or(call, places.share, 0.0)?,
            bias,
            random: Random { key: call.random_key, iteration: call.iteration },
        })
    }

    fn expect_result(&self, view: &View) -> Result<(), KernelError> {
        if matrices(view)?.shape == [self.batch, self.heads, self.queries, self.value_width] {
            Ok(())
        } else {
            Err(invalid!("attention with a result of shape {:?}", view.shape))
        }
    }

    /// Row sums may have more rows than there are queries: frameworks pad them. cuDNN's are
    /// columns.
    fn expect_sums(&self, view: &View) -> Result<(), KernelError> {
        match floating(view)?.shape[..] {
            [b, h, n] | [b, h, n, 1] if b == self.batch && h == self.heads && n >= self.queries => {
                Ok(())
            }
            _ => Err(invalid!("row sums of shape {:?}", view.shape)),
        }
    }
}

/// A forward call.
pub struct Forward<'a> {
    /// What is combined.
    pub of: Attention<'a>,
    /// The result.
    pub out: &'a View,
    /// Where the logarithm of each row's sum goes, if anywhere.
    pub sums: Option<&'a View>,
}

/// Reads the arguments of a forward operator.
///
/// # Errors
/// When the shapes don't fit, and for operators that are not known.
pub fn forward<'a>(call: &'a Call<'_>) -> Result<Forward<'a>, KernelError> {
    let places = match call.operator.kind.as_str() {
        "aten::scaled_dot_product_attention" => {
            Places { bias: Some(3), share: 4, causal: 5, scale: 6 }
        }
        "aten::_scaled_dot_product_efficient_attention" => {
            Places { bias: Some(3), share: 5, causal: 6, scale: 7 }
        }
        "aten::_scaled_dot_product_flash_attention" => {
            Places { bias: None, share: 3, causal: 4, scale: 6 }
        }
        "aten::_scaled_dot_product_cudnn_attention" => {
            Places { bias: Some(3), share: 5, causal: 6, scale: 8 }
        }
        other => return Err(unsupported!("the attention `{other}` is not known")),
    };
    let of = Attention::new(call, 0, &places)?;
    let out = output(call)?;
    of.expect_result(out)?;
    let sums = result(call, 1)?.filter(|s| s.shape.iter().product::<usize>() > 0);
    sums.map(|sums| of.expect_sums(sums)).transpose()?;
    Ok(Forward { of, out, sums })
}

/// A backward call.
pub struct Backward<'a> {
    /// What was combined.
    pub of: Attention<'a>,
    /// The gradient of the result.
    pub gradient: &'a View,
    /// The forward result.
    pub out: &'a View,
    /// The logarithm of each row's sum.
    pub sums: &'a View,
    /// Where the gradients of queries, keys and values go.
    pub results: [Option<&'a View>; 3],
    /// Where the gradient of the bias goes, with its steps by batch, head, query and key.
    pub bias: Option<(&'a View, [usize; 4])>,
}

/// Reads the arguments of a backward operator.
///
/// # Errors
/// When the shapes don't fit, and for operators that are not known.
pub fn backward<'a>(call: &'a Call<'_>) -> Result<Backward<'a>, KernelError> {
    let (places, saved, efficient) = match call.operator.kind.as_str() {
        "aten::_scaled_dot_product_efficient_attention_backward" => {
            (Places { bias: Some(4), share: 9, causal: 11, scale: 12 }, 5, true)
        }
        "aten::_scaled_dot_product_flash_attention_backward" => {
            (Places { bias: None, share: 10, causal: 11, scale: 14 }, 4, false)
        }
        "aten::_scaled_dot_product_cudnn_attention_backward" => {
            (Places { bias: Some(8), share: 13, causal: 14, scale: 15 }, 4, false)
        }
        other => return Err(unsupported!("the gradient `{other}` is not known")),
    };
    let wanted = |k: usize| match call.operator.args.get(10) {
        Some(Arg::Bools(mask)) if efficient => mask.get(k).copied().unwrap_or(false),
        _ => true,
    };
    let of = Attention::new(call, 1, &places)?;
    let (gradient, out, sums) = (tensor(call, 0)?, tensor(call, saved)?, tensor(call, saved + 1)?);
    same_shape(matrices(gradient)?, out)?;
    of.expect_result(out)?;
    of.expect_sums(sums)?;
    let mut results = [None; 3];
    for (i, slot) in results.iter_mut().enumerate() {
        *slot = result(call, i)?.filter(|_| wanted(i));
        if let Some(view) = *slot {
            same_shape(matrices(view)?, of.operands[i])?;
        }
    }
    let bias = match result(call, 3)?.filter(|_| efficient && wanted(3)) {
        Some(view) => {
            let steps = broadcast(view, &[of.batch, of.heads, of.queries, of.keys])?;
            Some((view, [steps[0], steps[1], steps[2], steps[3]]))
        }
        None => None,
    };
    Ok(Backward { of, gradient, out, sums, results, bias })
}
