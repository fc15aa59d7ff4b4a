//! One optimizer step of one parameter, and many of them made one launch.
//!
//! Not for: recorded multi-tensor calls, which are elementwise.

use super::super::super::host::kernels::strided::{once, same};
use super::super::super::host::view::{Call, View};
use super::super::launch::{
    Actions, CHUNK, Family, Launch, One, Operand, RANK, Scalars, TENSORS, Update, UpdateStrided,
    Vary,
};
use super::Emit;
use super::args::{elements, expect_shape, tensor};
use super::map::{join, signed};
use crate::job::optimizer::Rule;
use crate::job::{Dtype, Group};

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Rule::of_kind(kind).map(|_| step as Emit)
}

/// What a step of rule `kind` needs after `done` steps.
///
/// # Errors
/// When the job's optimizer lacks a number.
pub fn scalars(kind: &str, group: Option<&Group>, done: u64) -> Result<Scalars, String> {
    let group = group.ok_or_else(|| format!("{kind} needs the job's optimizer"))?;
    let needed = |name: &str| {
        group.value(name, done).ok_or_else(|| format!("{kind} needs the hyperparameter `{name}`"))
    };
    let maybe = |name: &str| group.value(name, 0).unwrap_or(0.0);
    let set = |name: &str| i32::from(maybe(name) != 0.0);
    let step = (done + 1) as f64;
    let decay = maybe("weight_decay");
    let mut of = Scalars::default();
    of.flag[0] = set("maximize");
    of.flag[1] = i32::from(decay != 0.0);
    of.s[0] = decay as f32;
    match kind {
        "neap::sgd" => {
            let momentum = maybe("momentum");
            of.flag[2..5].copy_from_slice(&[
                i32::from(momentum != 0.0),
                i32::from(done == 0),
                set("nesterov"),
            ]);
            of.s[1..4].copy_from_slice(&[
                -needed("lr")? as f32,
                momentum as f32,
                (1.0 - maybe("dampening")) as f32,
            ]);
        }
        "neap::adam" | "neap::adamw" => {
            let (lr, beta1, beta2) = (needed("lr")?, needed("beta1")?, needed("beta2")?);
            let decoupled = kind == "neap::adamw" || maybe("decoupled_weight_decay") != 0.0;
            of.flag[1] = i32::from(decay != 0.0 && !decoupled);
            of.flag[2..4].copy_from_slice(&[i32::from(decay != 0.0 && decoupled), set("amsgrad")]);
            of.s[1..8].copy_from_slice(&[
                (1.0 - lr * decay) as f32,
                (1.0 - beta1) as f32,
                beta2 as f32,
                (1.0 - beta2) as f32,
                -(lr / (1.0 - beta1.powf(step))) as f32,
                (1.0 - beta2.powf(step)).sqrt() as f32,
                needed("eps")? as f32,
            ]);
        }
        "neap::rmsprop" => {
            let alpha = needed("alpha")?;
            of.flag[2..4].copy_from_slice(&[i32::from(maybe("momentum") > 0.0), set("centered")]);
            of.s[1..6].copy_from_slice(&[
                alpha as f32,
                (1.0 - alpha) as f32,
                -needed("lr")? as f32,
                maybe("momentum") as f32,
                needed("eps")? as f32,
            ]);
        }
        "neap::adagrad" => {
            let rate = needed("lr")? / (1.0 + (step - 1.0) * maybe("lr_decay"));
            of.s[1..3].copy_from_slice(&[-rate as f32, needed("eps")? as f32]);
        }
        _ => return Err(format!("{kind} is no update that neap knows")),
    }
    Ok(of)
}

/// The kernels of a rule: Adam's serve `AdamW` too.
fn kernels(rule: &Rule) -> &'static str {
    rule.kind.trim_start_matches("neap::").trim_end_matches('w')
}

const NOTHING: One = One {
    first: 0,
    count: 0,
    parameter: std::ptr::null_mut(),
    gradient: std::ptr::null_mut(),
    state: [std::ptr::null_mut(); 3],
};

fn step(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let kind = &call.operator.kind;
    let scalars = scalars(kind, call.optimizer, call.steps_done)?;
    let (Some(rule), Some(group)) = (Rule::of_kind(kind), call.optimizer) else {
        return Err(format!("{kind} needs the job's optimizer"));
    };
    let count = rule.states_of(group).count();
    if call.args.len() != count + 2 {
        return Err(format!(
            "{kind} needs a parameter, a gradient and {count} states, not {} arguments",
            call.args.len()
        ));
    }
    let views: Vec<&View> = (0..count + 2).map(|at| tensor(call, at)).collect::<Result<_, _>>()?;
    for (at, view) in views.iter().enumerate() {
        if view.dtype != Dtype::F32 {
            return Err(format!("{kind} updates f32 only, not {:?}", view.dtype));
        }
        expect_shape(view, &views[0].shape)?;
        if at == 1 {
            continue;
        }
        let declared =
            call.outputs.iter().flatten().chain(call.hidden).any(|written| same(written, view));
        let shared = views.iter().enumerate().any(|(other, v)| other != at && same(v, view));
        if !declared || shared || !once(view) {
            return Err(format!(
                "{kind} cannot update argument {at}: the graph must say that it is written, and share none of it"
            ));
        }
    }
    let vary = Vary::Scalars(kind.clone(), call.operator.group);
    // Sorted by stride, the elements of all follow each other where one step walks them.
    let (shape, strides) =
        join(&views[0].shape, &views.iter().map(|v| signed(&v.stride)).collect::<Vec<_>>(), true)?;
    if elements(views[0]) == 0 {
        return Ok(());
    }
    if shape.len() <= 1 && strides.iter().all(|s| s.first().is_none_or(|&s| s == 1)) {
        let mut one = One {
            count: elements(views[0]),
            parameter: views[0].data,
            gradient: views[1].data,
            ..NOTHING
        };
        one.state.iter_mut().zip(&views[2..]).for_each(|(slot, view)| *slot = view.data);
        let mut update = Update { scalars, tensors: 1, of: [NOTHING; TENSORS] };
        update.of[0] = one;
        actions.vary(
            Family::Optimizer,
            &format!("update_{}", kernels(rule)),
            (one.count + CHUNK - 1) / CHUNK,
            [256, 1],
            &update,
            vary,
        );
        return Ok(());
    }
    let mut p = UpdateStrided {
        scalars,
        count: elements(views[0]),
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
        &format!("strided_{}", kernels(rule)),
        (p.count + 255) / 256,
        [256, 1],
        &p,
        vary,
    );
    Ok(())
}

/// Joins dense updates of one rule into as few launches as their parameters fit in; `None` where one of them isn't such.
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
            // SAFETY: an `update_` launch of this size was made of an `Update`, whose every byte pattern is one.
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
