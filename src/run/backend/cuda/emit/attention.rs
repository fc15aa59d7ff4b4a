//! Scaled dot-product attention and its gradient.
//!
//! Not for: paths that a framework takes apart itself, whose pieces are ordinary operators.

use super::super::super::host::kernels::arguments::{flag, maybe_number, number_or};
use super::super::super::host::kernels::elements::{broadcast, same_shape};
use super::super::super::host::kernels::random::survivors;
use super::super::super::host::view::{Call, View};
use super::super::launch::{Actions, Attention, Family, Operand, Random, Vary};
use super::Emit;
use super::args::{floating, maybe_tensor, output, result, tensor};
use super::map::{fill, signed};
use super::pointwise::threshold;
use crate::job::Arg;

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind.strip_prefix("aten::")? {
        "scaled_dot_product_attention" => |c, a| {
            let how = How {
                bias: maybe_tensor(c, 3)?,
                share: number_or(c, 4, 0.0)?,
                causal: flag(c, 5),
                scale: maybe_number(c, 6)?,
            };
            forward(c, a, &how)
        },
        "_scaled_dot_product_efficient_attention" => |c, a| {
            let how = How {
                bias: maybe_tensor(c, 3)?,
                share: number_or(c, 5, 0.0)?,
                causal: flag(c, 6),
                scale: maybe_number(c, 7)?,
            };
            forward(c, a, &how)
        },
        "_scaled_dot_product_flash_attention" => |c, a| {
            let how = How {
                bias: None,
                share: number_or(c, 3, 0.0)?,
                causal: flag(c, 4),
                scale: maybe_number(c, 6)?,
            };
            forward(c, a, &how)
        },
        "_scaled_dot_product_efficient_attention_backward" => |c, a| {
            let wanted = |k: usize| !matches!(c.operator.args.get(10), Some(Arg::Bools(mask)) if !mask.get(k).copied().unwrap_or(false));
            if wanted(3) && result(c, 3)?.is_some() {
                return Err("the gradient of an attention bias is not supported".into());
            }
            let how = How {
                bias: maybe_tensor(c, 4)?,
                share: number_or(c, 9, 0.0)?,
                causal: flag(c, 11),
                scale: maybe_number(c, 12)?,
            };
            backward(c, a, &how, [tensor(c, 5)?, tensor(c, 6)?], wanted)
        },
        "_scaled_dot_product_flash_attention_backward" => |c, a| {
            let how = How {
                bias: None,
                share: number_or(c, 10, 0.0)?,
                causal: flag(c, 11),
                scale: maybe_number(c, 14)?,
            };
            backward(c, a, &how, [tensor(c, 4)?, tensor(c, 5)?], |_| true)
        },
        _ => return None,
    })
}

struct How<'a> {
    bias: Option<&'a View>,
    share: f64,
    causal: bool,
    scale: Option<f64>,
}

fn matrix(view: &View) -> Result<&View, String> {
    if view.shape.len() == 4 {
        floating(view)
    } else {
        Err(format!("attention over a tensor of shape {:?}, not of four dimensions", view.shape))
    }
}

fn params(call: &Call<'_>, [q, k, v]: [&View; 3], how: &How<'_>) -> Result<Attention, String> {
    let fail = || format!("attention of shapes {:?}, {:?} and {:?}", q.shape, k.shape, v.shape);
    for view in [q, k, v] {
        matrix(view)?;
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
    if width.max(value_width) > 128 {
        return Err(format!(
            "attention over heads {} wide; the CUDA device has it up to 128",
            width.max(value_width)
        ));
    }
    let small = |n: usize| i32::try_from(n).ok().filter(|&n| n < 1 << 30).ok_or_else(fail);
    // A recorded scale has six decimals; the usual one is known exactly.
    let usual = 1.0 / (width.max(1) as f64).sqrt();
    let none = Operand::number(0.0);
    let bias = match how.bias {
        None => none,
        Some(bias) => {
            Operand::strided(bias, &signed(&broadcast(bias, &[batch, heads, queries, keys])?))?
        }
    };
    Ok(Attention {
        batch: small(batch)?,
        heads: small(heads)?,
        queries: small(queries)?,
        keys: small(keys)?,
        width: small(width)?,
        value_width: small(value_width)?,
        group: [small(heads / kh.max(1))?.max(1), small(heads / vh.max(1))?.max(1)],
        causal: i32::from(how.causal),
        dropout: i32::from(how.share > 0.0),
        scale: how.scale.filter(|s| (s - usual).abs() > 6e-7).unwrap_or(usual) as f32,
        factor: survivors(how.share),
        random: Random {
            key: call.random_key,
            iteration: call.iteration,
            threshold: threshold(how.share),
        },
        q: Operand::of(q)?,
        k: Operand::of(k)?,
        v: Operand::of(v)?,
        bias,
        out: none,
        sums: none,
        gradient: none,
        dq: none,
        dk: none,
        dv: none,
    })
}

fn launch(actions: &mut Actions, kernel: &str, p: &Attention, rows: i32, heads: i32) {
    let (tile, width) = if p.width.max(p.value_width) <= 64 { (32, 64) } else { (16, 128) };
    let blocks = (i64::from(rows) + tile - 1) / tile * i64::from(heads) * i64::from(p.batch);
    let iteration =
        std::mem::offset_of!(Attention, random) + std::mem::offset_of!(Random, iteration);
    actions.vary(
        Family::Attention,
        &format!("{kernel}_{width}"),
        blocks,
        [16, 16],
        p,
        Vary::Iteration(iteration),
    );
}

/// Row sums, whose queries frameworks may pad.
fn row_sums(view: &View, p: &Attention) -> Result<Operand, String> {
    match floating(view)?.shape[..] {
        [b, h, n] if b == p.batch as usize && h == p.heads as usize && n >= p.queries as usize => {
            Operand::of(view)
        }
        _ => Err(format!("row sums of shape {:?}", view.shape)),
    }
}

fn result_shape(view: &View, p: &Attention) -> Result<(), String> {
    if view.shape == [p.batch, p.heads, p.queries, p.value_width].map(|n| n as usize) {
        Ok(())
    } else {
        Err(format!("attention with a result of shape {:?}", view.shape))
    }
}

fn forward(call: &Call<'_>, actions: &mut Actions, how: &How<'_>) -> Result<(), String> {
    let mut p = params(call, [tensor(call, 0)?, tensor(call, 1)?, tensor(call, 2)?], how)?;
    let out = matrix(output(call)?)?;
    result_shape(out, &p)?;
    p.out = Operand::of(out)?;
    if let Some(sums) = result(call, 1)?.filter(|s| s.shape.iter().product::<usize>() > 0) {
        p.sums = row_sums(sums, &p)?;
    }
    launch(actions, "attention", &p, p.queries, p.heads);
    Ok(())
}

fn backward(
    call: &Call<'_>,
    actions: &mut Actions,
    how: &How<'_>,
    [out, sums]: [&View; 2],
    wanted: impl Fn(usize) -> bool,
) -> Result<(), String> {
    let gradient = matrix(tensor(call, 0)?)?;
    let operands = [tensor(call, 1)?, tensor(call, 2)?, tensor(call, 3)?];
    let mut p = params(call, operands, how)?;
    same_shape(gradient, matrix(out)?)?;
    result_shape(out, &p)?;
    (p.out, p.gradient, p.sums) = (Operand::of(out)?, Operand::of(gradient)?, row_sums(sums, &p)?);
    let mut results = [None; 3];
    for (i, slot) in results.iter_mut().enumerate() {
        if let Some(view) = result(call, i)?.filter(|_| wanted(i)) {
            same_shape(matrix(view)?, operands[i])?;
            *slot = Some(view);
            if p.queries == 0 || p.keys == 0 {
                fill(actions, view, 0.0)?;
            }
        }
    }
    if p.queries == 0 || p.keys == 0 {
        return Ok(());
    }
    let [dq, dk, dv] = results;
    if let Some(dq) = dq {
        launch(
            actions,
            "attention_back_queries",
            &Attention { dq: Operand::of(dq)?, ..p },
            p.queries,
            p.heads,
        );
    }
    let both = p.group[0] == p.group[1];
    let (dk, dv) = (dk.map(Operand::of).transpose()?, dv.map(Operand::of).transpose()?);
    let none = Operand::number(0.0);
    if both && (dk.is_some() || dv.is_some()) {
        let p = Attention { dk: dk.unwrap_or(none), dv: dv.unwrap_or(none), ..p };
        launch(actions, "attention_back_keys", &p, p.keys, p.heads / p.group[0]);
        return Ok(());
    }
    if let Some(dk) = dk {
        launch(
            actions,
            "attention_back_keys",
            &Attention { dk, ..p },
            p.keys,
            p.heads / p.group[0],
        );
    }
    if let Some(dv) = dv {
        launch(
            actions,
            "attention_back_keys",
            &Attention { dv, ..p },
            p.keys,
            p.heads / p.group[1],
        );
    }
    Ok(())
}
