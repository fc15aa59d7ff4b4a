//! One optimizer step of one parameter, and many of them made one launch.

use crate::backend::operators::KernelError;
use crate::backend::operators::error::unsupported;
use crate::backend::operators::optimizer::{Moments, Rule, Step};
use crate::backend::operators::shapes::count;
use crate::backend::operators::view::Call;
use crate::job::Group;

use super::super::launch::{Actions, Family, Launch, Vary};
use super::super::params::{
    CHUNK, One, Operand, RANK, Scalars, TENSORS, Update, UpdateStrided, code,
};
use super::Emit;
use super::map::{join, signed};

/// The updates that CUDA has, each with its kernel: `update_` and `strided_` in
/// kernels/optimizer.cu.
const KERNELS: &[(&str, &str)] = &[
    ("neap::sgd", "sgd"),
    ("neap::adam", "adam"),
    ("neap::adamw", "adam"),
    ("neap::rmsprop", "rmsprop"),
    ("neap::adagrad", "adagrad"),
    ("neap::nadam", "nadam"),
    ("neap::radam", "radam"),
    ("neap::adamax", "adamax"),
    ("neap::adadelta", "adadelta"),
    ("neap::asgd", "asgd"),
    ("neap::rprop", "rprop"),
];

/// The kinds of these updates.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    KERNELS.iter().map(|(kind, _)| *kind)
}

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    kinds().any(|known| known == kind).then_some(step as Emit)
}

/// What a step of optimizer `kind` needs after `done` steps, as kernels/optimizer.cu reads it.
///
/// # Errors
/// When the job's optimizer lacks a number.
pub fn scalars(kind: &str, group: Option<&Group>, done: u64) -> Result<Scalars, KernelError> {
    packed(&Step::new(kind, group, done)?, group)
}

fn packed(step: &Step, group: Option<&Group>) -> Result<Scalars, KernelError> {
    let mut of = Scalars::default();
    of.flag[5] = i32::from(group.is_some_and(|group| group.on("fused")));
    of.flag[0] = i32::from(step.maximize);
    of.flag[1] = i32::from(step.decay.is_some());
    of.s[0] = step.decay.unwrap_or(0.0);
    match step.rule {
        Rule::Sgd { minus_lr, momentum } => {
            of.s[1] = minus_lr;
            if let Some(m) = momentum {
                of.flag[2..5].copy_from_slice(&[1, i32::from(m.first), i32::from(m.nesterov)]);
                of.s[2..4].copy_from_slice(&[m.momentum, m.fresh]);
            }
        }
        Rule::Adam { shrink, weight1, keep2, weight2, step_size, correction, eps, amsgrad } => {
            of.flag[2..4].copy_from_slice(&[i32::from(shrink.is_some()), i32::from(amsgrad)]);
            let shrink = shrink.unwrap_or(1.0);
            of.s[1..8]
                .copy_from_slice(&[shrink, weight1, keep2, weight2, step_size, correction, eps]);
        }
        Rule::RmsProp { keep, weight, minus_lr, momentum, eps, centered } => {
            of.flag[2..4].copy_from_slice(&[i32::from(momentum.is_some()), i32::from(centered)]);
            let momentum = momentum.unwrap_or(0.0);
            of.s[1..6].copy_from_slice(&[keep, weight, minus_lr, momentum, eps]);
        }
        Rule::Nadam { of: moments, correction2, fresh, mean } => {
            put_moments(&mut of, &moments);
            of.s[6..9].copy_from_slice(&[correction2, fresh, mean]);
        }
        Rule::Radam { of: moments, step_size, rectified } => {
            put_moments(&mut of, &moments);
            of.flag[3] = i32::from(rectified.is_some());
            of.s[6..8].copy_from_slice(&[step_size, rectified.unwrap_or(1.0)]);
        }
        Rule::Adamax { of: moments, step_size } => {
            put_moments(&mut of, &moments);
            of.s[6] = step_size;
        }
        Rule::Adadelta { keep, weight, minus_lr, eps } => {
            of.s[1..5].copy_from_slice(&[keep, weight, minus_lr, eps]);
        }
        Rule::Asgd { shrink, minus_rate, share } => {
            of.s[1..4].copy_from_slice(&[shrink, minus_rate, share]);
        }
        Rule::Rprop { factors, limits, start } => {
            of.flag[2] = i32::from(start.is_some());
            of.s[1..3].copy_from_slice(&factors);
            of.s[3..5].copy_from_slice(&limits);
            of.s[5] = start.unwrap_or(0.0);
        }
        Rule::Adagrad { minus_rate, eps } => of.s[1..3].copy_from_slice(&[minus_rate, eps]),
        #[allow(unreachable_patterns, reason = "a rule may be the host's alone")]
        _ => return Err(unsupported!("CUDA has no kernel for this optimizer")),
    }
    Ok(of)
}

fn put_moments(of: &mut Scalars, moments: &Moments) {
    of.flag[2] = i32::from(moments.shrink.is_some());
    let Moments { shrink, weight1, keep2, weight2, eps } = *moments;
    of.s[1..6].copy_from_slice(&[shrink.unwrap_or(1.0), weight1, keep2, weight2, eps]);
}

const NOTHING: One = One {
    first: 0,
    count: 0,
    parameter: std::ptr::null_mut(),
    gradient: std::ptr::null_mut(),
    state: [std::ptr::null_mut(); 3],
    dtype: [0; 8],
};

fn step(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let kind = &call.operator.kind;
    let step = Step::new(kind, call.optimizer, call.steps_done)?;
    let views = step.views(call)?;
    let (_, kernel) = KERNELS
        .iter()
        .find(|(known, _)| known == kind)
        .ok_or_else(|| unsupported!("CUDA has no kernel for `{kind}`"))?;
    let (scalars, elements) = (packed(&step, call.optimizer)?, count(&views[0]) as i64);
    let vary = Vary::Scalars(kind.clone(), call.operator.group);
    // Sorted by stride, the elements of all follow each other where one step walks them.
    let (shape, strides) =
        join(&views[0].shape, &views.iter().map(|v| signed(&v.stride)).collect::<Vec<_>>(), true)?;
    if elements == 0 {
        return Ok(());
    }
    if shape.len() <= 1 && strides.iter().all(|s| s.first().is_none_or(|&s| s == 1)) {
        let mut one =
            One { count: elements, parameter: views[0].data, gradient: views[1].data, ..NOTHING };
        one.state.iter_mut().zip(&views[2..]).for_each(|(slot, view)| *slot = view.data);
        for (slot, view) in one.dtype.iter_mut().zip(&views) {
            *slot = code(view.dtype)? as u8;
        }
        let mut update = Update { scalars, tensors: 1, of: [NOTHING; TENSORS] };
        update.of[0] = one;
        actions.vary(
            Family::Optimizer,
            &format!("update_{kernel}"),
            (one.count + CHUNK - 1) / CHUNK,
            [256, 1],
            &update,
            vary,
        );
        return Ok(());
    }
    let mut p = UpdateStrided {
        scalars,
        count: elements,
        rank: shape.len() as i64,
        shape: [1; RANK],
        o: [Operand::number(0.0); 5],
    };
    p.shape[..shape.len()].copy_from_slice(&shape);
    for ((slot, view), stride) in p.o.iter_mut().zip(&views).zip(&strides) {
        *slot = Operand::strided(view, stride)?;
    }
    actions.vary(
        Family::Optimizer,
        &format!("strided_{kernel}"),
        (p.count + 255) / 256,
        [256, 1],
        &p,
        vary,
    );
    Ok(())
}

/// Joins dense updates of one rule into as few launches as their parameters fit in. Returns `None`
/// if one of `launches` is not a dense update of that rule.
#[must_use]
pub fn fuse(launches: &[&Launch]) -> Option<Vec<Launch>> {
    let first = launches.first()?;
    let fits = |l: &&&Launch| {
        l.kernel == first.kernel && l.params.len() == size_of::<Update>() && l.vary == first.vary
    };
    if !first.kernel.starts_with("update_")
        || launches.iter().filter(fits).count() != launches.len()
    {
        return None;
    }
    let mut fused = Vec::new();
    for some in launches.chunks(TENSORS) {
        let mut all: Option<Update> = None;
        let mut blocks = 0;
        for (at, launch) in some.iter().enumerate() {
            // SAFETY: an `update_` launch of this size was made of an `Update`, whose every byte
            // pattern is one.
            let own = unsafe { launch.params.as_ptr().cast::<Update>().read_unaligned() };
            let all = all.get_or_insert(own);
            all.of[at] = One { first: blocks, ..own.of[0] };
            all.tensors = at as i64 + 1;
            blocks += i64::from(launch.grid);
        }
        let mut actions = Actions::new(std::ptr::null_mut(), 0);
        actions.vary(Family::Optimizer, &first.kernel, blocks, [256, 1], &all?, first.vary.clone());
        fused.extend(actions.list.into_iter().filter_map(|a| {
            if let super::super::launch::Action::Launch(l) = a { Some(l) } else { None }
        }));
    }
    Some(fused)
}
