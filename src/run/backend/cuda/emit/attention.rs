//! Scaled dot-product attention and its gradient.

use crate::backend::operators::arguments::is_floating;
use crate::backend::operators::attention::{self, Attention as Of};
use crate::backend::operators::error::unsupported;
use crate::backend::operators::random::{survivors, threshold};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};
use crate::job::Dtype;

use super::super::launch::{Actions, Family, Vary};
use super::super::params::{Attention, Operand, Random};
use super::Emit;
use super::map::{fill, signed};

pub const TABLE: Table<Emit> = table! {
    "scaled_dot_product_attention" | "_scaled_dot_product_efficient_attention"
    | "_scaled_dot_product_flash_attention" | "_scaled_dot_product_cudnn_attention" => forward,
    "_scaled_dot_product_efficient_attention_backward"
    | "_scaled_dot_product_flash_attention_backward"
    | "_scaled_dot_product_cudnn_attention_backward" => backward,
};

fn params(of: &Of<'_>) -> Result<Attention, KernelError> {
    if of.width.max(of.value_width) > 256 {
        return Err(unsupported!(
            "attention over heads {} wide; the CUDA device has it up to 256",
            of.width.max(of.value_width)
        ));
    }
    let small = |n: usize| {
        i32::try_from(n)
            .ok()
            .filter(|&n| n < 1 << 30)
            .ok_or_else(|| unsupported!("attention over an extent of {n}"))
    };
    if let Some((bias, _)) = &of.bias
        && !is_floating(bias)
        && !matches!(bias.dtype, Dtype::Bool | Dtype::U8)
    {
        return Err(unsupported!("an attention mask of {:?}", bias.dtype));
    }
    let none = Operand::number(0.0);
    let bias =
        of.bias.as_ref().map_or(Ok(none), |(b, stride)| Operand::strided(b, &signed(stride)))?;
    let [q, k, v] = of.operands;
    Ok(Attention {
        batch: small(of.batch)?,
        heads: small(of.heads)?,
        queries: small(of.queries)?,
        keys: small(of.keys)?,
        width: small(of.width)?,
        value_width: small(of.value_width)?,
        group: [small(of.group[0])?, small(of.group[1])?],
        causal: i32::from(of.causal),
        dropout: i32::from(of.share > 0.0),
        scale: of.scale,
        factor: survivors(of.share),
        random: Random {
            key: of.random.key,
            iteration: of.random.iteration,
            threshold: threshold(of.share),
        },
        q: Operand::new(q)?,
        k: Operand::new(k)?,
        v: Operand::new(v)?,
        bias,
        out: none,
        sums: none,
        gradient: none,
        dq: none,
        dk: none,
        dv: none,
        delta: std::ptr::null_mut(),
    })
}

/// Which kernels carry attention out.
struct Kernels {
    family: Family,
    /// Rows of a tile.
    tile: i64,
    block: [u32; 2],
    /// What their names end in: the widest head, and the type on tensor cores.
    suffix: &'static str,
}

impl Kernels {
    fn new(p: &Attention, typed: Option<Dtype>, forward: bool, ampere: bool) -> Self {
        let width = p.width.max(p.value_width);
        let typed = typed.filter(|_| ampere && (width <= 64 || forward && width <= 128));
        let suffix = match (typed, width <= 64) {
            (Some(Dtype::Bf16), true) => "_bf16_64",
            (Some(Dtype::F16), true) => "_f16_64",
            (Some(Dtype::Bf16), false) => "_bf16_128",
            (Some(Dtype::F16), false) => "_f16_128",
            _ if ampere && width <= 64 => {
                let family = Family::AttentionBlocked;
                return Self { family, tile: 64, block: [16, 16], suffix: "_64" };
            }
            _ => {
                let suffix = if width <= 128 { "_128" } else { "_256" };
                return Self { family: Family::Attention, tile: 16, block: [16, 16], suffix };
            }
        };
        Self { family: Family::AttentionMma, tile: 64, block: [32, 4], suffix }
    }
}

/// The type that all these have, where tensor cores take it.
fn same_type(views: &[&View]) -> Option<Dtype> {
    let dtype = views.first()?.dtype;
    let halves = matches!(dtype, Dtype::Bf16 | Dtype::F16);
    (halves && views.iter().all(|view| view.dtype == dtype)).then_some(dtype)
}

/// Shared memory that kernels take beside what they declare.
fn shared(kernel: &str) -> u32 {
    match kernel {
        "attention_back_queries_64" => 64 << 10,
        "attention_back_keys_64" => 96 << 10,
        _ => 0,
    }
}

fn launch(
    actions: &mut Actions,
    kernel: &str,
    p: &Attention,
    typed: Option<Dtype>,
    (rows, heads): (i32, i32),
) {
    let Kernels { family, tile, block, suffix } =
        Kernels::new(p, typed, kernel == "attention", actions.ampere);
    let blocks = (i64::from(rows) + tile - 1) / tile * i64::from(heads) * i64::from(p.batch);
    let iteration =
        std::mem::offset_of!(Attention, random) + std::mem::offset_of!(Random, iteration);
    let kernel = format!("{kernel}{suffix}");
    actions.vary(family, &kernel, blocks, block, p, Vary::Iteration(iteration));
    actions.shared(shared(&kernel));
}

fn forward(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let attention::Forward { of, out, sums } = attention::forward(call)?;
    let mut p = params(&of)?;
    p.out = Operand::new(out)?;
    if let Some(sums) = sums {
        p.sums = Operand::new(sums)?;
    }
    let [q, k, v] = of.operands;
    launch(actions, "attention", &p, same_type(&[q, k, v, out]), (p.queries, p.heads));
    Ok(())
}

fn backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let attention::Backward { of, gradient, out, sums, results, bias } = attention::backward(call)?;
    if bias.is_some() {
        return Err(unsupported!("the gradient of an attention bias is not supported"));
    }
    let mut p = params(&of)?;
    (p.out, p.gradient, p.sums) =
        (Operand::new(out)?, Operand::new(gradient)?, Operand::new(sums)?);
    if p.queries == 0 || p.keys == 0 {
        return results.into_iter().flatten().try_for_each(|view| fill(actions, view, 0.0));
    }
    let ([dq, dk, dv], [q, k, v]) = (results, of.operands);
    let typed: Vec<&View> =
        [q, k, v, gradient].into_iter().chain(results.into_iter().flatten()).collect();
    let typed = same_type(&typed);
    let rows = i64::from(p.batch) * i64::from(p.heads) * i64::from(p.queries);
    let beside = (std::mem::offset_of!(Attention, delta), (4 * rows) as u64);
    actions.launch(Family::Attention, "attention_deltas", (rows + 7) / 8, [32, 8], &p);
    actions.beside(beside.0, beside.1);
    let mut back = |kernel, p: &Attention, rows, heads| {
        launch(actions, kernel, p, typed, (rows, heads));
        actions.beside(beside.0, beside.1);
    };
    if let Some(dq) = dq {
        let p = Attention { dq: Operand::new(dq)?, ..p };
        back("attention_back_queries", &p, p.queries, p.heads);
    }
    let both = p.group[0] == p.group[1];
    let (dk, dv) = (dk.map(Operand::new).transpose()?, dv.map(Operand::new).transpose()?);
    let none = Operand::number(0.0);
    if both && (dk.is_some() || dv.is_some()) {
        let p = Attention { dk: dk.unwrap_or(none), dv: dv.unwrap_or(none), ..p };
        back("attention_back_keys", &p, p.keys, p.heads / p.group[0]);
        return Ok(());
    }
    if let Some(dk) = dk {
        back("attention_back_keys", &Attention { dk, ..p }, p.keys, p.heads / p.group[0]);
    }
    if let Some(dv) = dv {
        back("attention_back_keys", &Attention { dv, ..p }, p.keys, p.heads / p.group[1]);
    }
    Ok(())
}
