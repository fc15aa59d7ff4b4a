//! Optimizers: one row each, and the numbers of one step.
//!
//! The arithmetic is that of PyTorch's multi-tensor steps: scalars in double precision, rounded to
//! f32 where they meet a tensor.

use super::KernelError;
use super::arguments::{expect_shape, real};
use super::error::invalid;
use super::shapes::{once, same};
use super::view::{Call, View};
use crate::job::Group;
use crate::job::optimizer::RULES;

/// Reads one optimizer's numbers for one step.
type Read = fn(&Numbers<'_>) -> Result<Rule, KernelError>;

/// For each optimizer of [`RULES`], the kind of its updates and the function that reads the numbers
/// of one step.
const READERS: &[(&str, Read)] = &[
    ("neap::sgd", sgd),
    ("neap::adam", |of| adam(of, of.is("decoupled_weight_decay"))),
    ("neap::adamw", |of| adam(of, true)),
    ("neap::rmsprop", rmsprop),
    ("neap::adagrad", adagrad),
    ("neap::nadam", nadam),
    ("neap::radam", radam),
    ("neap::adamax", adamax),
    ("neap::adadelta", adadelta),
    ("neap::asgd", asgd),
    ("neap::rprop", rprop),
];

/// The kinds of all optimizers.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    READERS.iter().map(|(kind, _)| *kind)
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The gradient is negated.
    pub maximize: bool,
    /// What is added to the gradient for each unit of the parameter.
    pub decay: Option<f32>,
    /// What is done with it.
    pub rule: Rule,
    /// How many states each parameter has.
    states: usize,
}

/// An optimizer's rule for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Stochastic gradient descent.
    Sgd {
        /// Minus the learning rate.
        minus_lr: f32,
        /// Where there is a momentum.
        momentum: Option<Momentum>,
    },
    /// Adam and AdamW.
    Adam {
        /// Factor of the parameter where weight decay is decoupled.
        shrink: Option<f32>,
        /// 1 - beta1.
        weight1: f32,
        /// beta2.
        keep2: f32,
        /// 1 - beta2.
        weight2: f32,
        /// Minus the learning rate over the first moment's bias correction.
        step_size: f32,
        /// Root of the second moment's bias correction.
        correction: f32,
        /// Added to the denominator.
        eps: f32,
        /// The largest second moment so far is kept and used.
        amsgrad: bool,
    },
    /// `RMSprop`.
    RmsProp {
        /// alpha.
        keep: f32,
        /// 1 - alpha.
        weight: f32,
        /// Minus the learning rate.
        minus_lr: f32,
        /// Factor of the step before.
        momentum: Option<f32>,
        /// Added to the denominator.
        eps: f32,
        /// The mean gradient is subtracted from the second moment.
        centered: bool,
    },
    /// Adam with Nesterov's momentum (Dozat, 2016).
    Nadam {
        /// The moments.
        of: Moments,
        /// The second moment's bias correction.
        correction2: f32,
        /// Factor of the gradient over the root, minus the rate included.
        fresh: f32,
        /// Factor of the first moment over the root, minus the rate included.
        mean: f32,
    },
    /// Adam with a rectified variance (Liu et al., 2020).
    Radam {
        /// The moments.
        of: Moments,
        /// Minus the learning rate over the first moment's bias correction.
        step_size: f32,
        /// Rectification times the root of the second bias correction; `None` in the first steps,
        /// whose variance is not known.
        rectified: Option<f32>,
    },
    /// Adam with the infinity norm (Kingma and Ba, 2015, section 7.1).
    Adamax {
        /// The moments; the second is the norm.
        of: Moments,
        /// Minus the learning rate over the first moment's bias correction.
        step_size: f32,
    },
    /// Adadelta (Zeiler, 2012).
    Adadelta {
        /// rho.
        keep: f32,
        /// 1 - rho.
        weight: f32,
        /// Minus the learning rate.
        minus_lr: f32,
        /// Added under the roots.
        eps: f32,
    },
    /// Averaged stochastic gradient descent (Polyak and Juditsky, 1992).
    Asgd {
        /// Factor of the parameter.
        shrink: f32,
        /// Minus the decayed learning rate.
        minus_rate: f32,
        /// Share of the parameter in the average.
        share: f32,
    },
    /// Resilient backpropagation (Riedmiller and Braun, 1993).
    Rprop {
        /// Factors of the step's size where the gradient's sign changes, and where it stays.
        factors: [f32; 2],
        /// The least and the largest step.
        limits: [f32; 2],
        /// The step's size in the first step; later it is a state.
        start: Option<f32>,
    },
    /// Adagrad.
    Adagrad {
        /// Minus the decayed learning rate.
        minus_rate: f32,
        /// Added to the denominator.
        eps: f32,
    },
}

/// The running means of gradients and their squares, as Adam keeps them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    /// Factor of the parameter where weight decay is decoupled.
    pub shrink: Option<f32>,
    /// 1 - beta1.
    pub weight1: f32,
    /// beta2.
    pub keep2: f32,
    /// 1 - beta2.
    pub weight2: f32,
    /// Added to the denominator.
    pub eps: f32,
}

/// The momentum of stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Momentum {
    /// Factor of the buffer.
    pub momentum: f32,
    /// Factor of the gradient: 1 - dampening.
    pub fresh: f32,
    /// The buffer starts as the gradient.
    pub first: bool,
    /// The step looks ahead.
    pub nesterov: bool,
}

impl Step {
    /// The step of optimizer `kind` after `done` steps, by the parameter group's numbers.
    ///
    /// # Errors
    /// For an optimizer that is not known, and when the job's optimizer lacks a number.
    pub fn new(kind: &str, group: Option<&Group>, done: u64) -> Result<Self, KernelError> {
        let (_, read) = READERS
            .iter()
            .find(|(known, _)| *known == kind)
            .ok_or_else(|| invalid!("the optimizer `{kind}` is not known"))?;
        let group = group.ok_or_else(|| invalid!("{kind} needs the job's optimizer"))?;
        let of = Numbers { kind, group, done };
        let decoupled = kind == "neap::adamw" || of.is("decoupled_weight_decay");
        let decay = of.maybe("weight_decay");
        let states = RULES.iter().find(|row| row.kind == kind).map_or(&[][..], |row| row.states);
        Ok(Self {
            maximize: of.is("maximize"),
            decay: (decay != 0.0 && !decoupled).then_some(decay as f32),
            rule: read(&of)?,
            states: states.iter().filter(|(_, flag)| flag.is_empty() || of.is(flag)).count(),
        })
    }

    /// The parameter, its gradient and its states, in the order in which PyTorch makes them, all of
    /// the parameter's shape. A recorded gradient may have dimensions of extent 1 besides.
    ///
    /// # Errors
    /// When one is missing, of another shape or shared, or when the graph does not say that it is
    /// written.
    pub fn views(&self, call: &Call<'_>) -> Result<Vec<View>, KernelError> {
        let count = self.states + 2;
        if call.args.len() != count {
            return Err(invalid!(
                "a parameter, a gradient and {} states are needed, not {} arguments",
                count - 2,
                call.args.len()
            ));
        }
        let seen: Vec<&View> = (0..count).map(|at| real(call, at)).collect::<Result<_, _>>()?;
        let parameter = seen[0];
        let views: Vec<View> = seen.iter().map(|view| alike(view, parameter)).collect();
        for (at, view) in seen.iter().enumerate() {
            expect_shape("a gradient or state", &views[at], &parameter.shape)?;
            if at == 1 {
                continue;
            }
            let declared =
                call.outputs.iter().flatten().chain(call.hidden).any(|written| same(written, view));
            let shared = seen.iter().enumerate().any(|(other, v)| other != at && same(v, view));
            if !declared || shared || !once(view) {
                return Err(invalid!(
                    "it cannot update argument {at}: the graph must say that it is written, and \
                     share none of it"
                ));
            }
        }
        Ok(views)
    }
}

/// A view in the shape of another, where they differ in dimensions of extent 1 only.
fn alike(view: &View, like: &View) -> View {
    let wide = |v: &View| v.shape.iter().copied().filter(|&n| n != 1).collect::<Vec<_>>();
    if wide(view) != wide(like) {
        return view.clone();
    }
    let own = view.shape.iter().zip(&view.stride).filter(|(n, _)| **n != 1);
    let mut steps = own.map(|(_, &step)| step);
    let stride = like
        .shape
        .iter()
        .zip(&like.stride)
        .map(|(&n, &step)| if n == 1 { step } else { steps.next().unwrap_or(step) });
    View { shape: like.shape.clone(), stride: stride.collect(), ..view.clone() }
}

/// Where a rule's numbers come from.
struct Numbers<'a> {
    kind: &'a str,
    group: &'a Group,
    done: u64,
}

impl Numbers<'_> {
    fn needed(&self, name: &str) -> Result<f64, KernelError> {
        let missing = || invalid!("{} needs the hyperparameter `{name}`", self.kind);
        self.group.value(name, self.done).ok_or_else(missing)
    }

    /// A hyperparameter whose absence means that the feature is off.
    fn maybe(&self, name: &str) -> f64 {
        self.group.value(name, self.done).unwrap_or(0.0)
    }

    /// Whether a feature is on. A schedule can change its number, but not switch it: it decides
    /// which states there are.
    fn is(&self, name: &str) -> bool {
        self.group.value(name, 0).is_some_and(|value| value != 0.0)
    }

    /// The number of this step, from 1.
    fn step(&self) -> f64 {
        (self.done + 1) as f64
    }
}

fn sgd(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let momentum = of.maybe("momentum");
    let momentum = of.is("momentum").then(|| Momentum {
        momentum: momentum as f32,
        fresh: (1.0 - of.maybe("dampening")) as f32,
        first: of.done == 0,
        nesterov: of.is("nesterov"),
    });
    Ok(Rule::Sgd { minus_lr: -of.needed("lr")? as f32, momentum })
}

fn adam(of: &Numbers<'_>, decoupled: bool) -> Result<Rule, KernelError> {
    let (lr, beta1, beta2) = (of.needed("lr")?, of.needed("beta1")?, of.needed("beta2")?);
    let decay = of.maybe("weight_decay");
    Ok(Rule::Adam {
        shrink: (decoupled && decay != 0.0).then_some((1.0 - lr * decay) as f32),
        weight1: (1.0 - beta1) as f32,
        keep2: beta2 as f32,
        weight2: (1.0 - beta2) as f32,
        step_size: -(lr / (1.0 - beta1.powf(of.step()))) as f32,
        correction: (1.0 - beta2.powf(of.step())).sqrt() as f32,
        eps: of.needed("eps")? as f32,
        amsgrad: of.is("amsgrad"),
    })
}

/// The moments of Adam's family.
fn moments(of: &Numbers<'_>) -> Result<Moments, KernelError> {
    let (lr, decay) = (of.needed("lr")?, of.maybe("weight_decay"));
    let (beta1, beta2) = (of.needed("beta1")?, of.needed("beta2")?);
    let decoupled = of.is("decoupled_weight_decay") && decay != 0.0;
    Ok(Moments {
        shrink: decoupled.then_some((1.0 - lr * decay) as f32),
        weight1: (1.0 - beta1) as f32,
        keep2: beta2 as f32,
        weight2: (1.0 - beta2) as f32,
        eps: of.needed("eps")? as f32,
    })
}

fn nadam(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    // A product of 4,096 factors is 0 beside 1, whatever follows.
    const FACTORS: f64 = 4096.0;
    let (lr, beta1, beta2) = (of.needed("lr")?, of.needed("beta1")?, of.needed("beta2")?);
    let psi = of.needed("momentum_decay")?;
    let mu = |step: f64| beta1 * (1.0 - 0.5 * 0.96f64.powf(step * psi));
    let mut product = 1.0;
    let mut step = 0.0;
    while step < of.step().min(FACTORS) {
        step += 1.0;
        product *= mu(step);
    }
    let (now, next) = (mu(of.step()), mu(of.step() + 1.0));
    Ok(Rule::Nadam {
        of: moments(of)?,
        correction2: (1.0 - beta2.powf(of.step())) as f32,
        fresh: (-lr * (1.0 - now) / (1.0 - product)) as f32,
        mean: (-lr * next / (1.0 - product * next)) as f32,
    })
}

fn radam(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let (lr, beta1, beta2) = (of.needed("lr")?, of.needed("beta1")?, of.needed("beta2")?);
    let correction2 = 1.0 - beta2.powf(of.step());
    let longest = 2.0 / (1.0 - beta2) - 1.0;
    let length = longest - 2.0 * of.step() * beta2.powf(of.step()) / correction2;
    let rectified = || {
        let above = (length - 4.0) * (length - 2.0) * longest;
        let below = (longest - 4.0) * (longest - 2.0) * length;
        ((above / below).sqrt() * correction2.sqrt()) as f32
    };
    Ok(Rule::Radam {
        of: moments(of)?,
        step_size: -(lr / (1.0 - beta1.powf(of.step()))) as f32,
        rectified: (length > 5.0).then(rectified),
    })
}

fn adamax(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let rate = of.needed("lr")? / (1.0 - of.needed("beta1")?.powf(of.step()));
    Ok(Rule::Adamax { of: moments(of)?, step_size: -rate as f32 })
}

fn adadelta(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let (rho, lr) = (of.needed("rho")?, of.needed("lr")?);
    Ok(Rule::Adadelta {
        keep: rho as f32,
        weight: (1.0 - rho) as f32,
        minus_lr: -lr as f32,
        eps: of.needed("eps")? as f32,
    })
}

fn asgd(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let (lr, lambd, alpha) = (of.needed("lr")?, of.needed("lambd")?, of.needed("alpha")?);
    // Rate and share are those that the step before has left behind.
    let before = of.step() - 1.0;
    let rate = lr / (1.0 + lambd * lr * before).powf(alpha);
    let share = 1.0 / (before - of.needed("t0")?).max(1.0);
    Ok(Rule::Asgd {
        shrink: (1.0 - lambd * rate) as f32,
        minus_rate: -rate as f32,
        share: share as f32,
    })
}

fn rprop(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let number = |name: &str| of.needed(name).map(|value| value as f32);
    Ok(Rule::Rprop {
        factors: [number("eta1")?, number("eta2")?],
        limits: [number("step_size1")?, number("step_size2")?],
        start: (of.done == 0).then_some(number("lr")?),
    })
}

fn rmsprop(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let (alpha, momentum) = (of.needed("alpha")?, of.maybe("momentum"));
    Ok(Rule::RmsProp {
        keep: alpha as f32,
        weight: (1.0 - alpha) as f32,
        minus_lr: -of.needed("lr")? as f32,
        momentum: of.is("momentum").then_some(momentum as f32),
        eps: of.needed("eps")? as f32,
        centered: of.is("centered"),
    })
}

fn adagrad(of: &Numbers<'_>) -> Result<Rule, KernelError> {
    let rate = of.needed("lr")? / (1.0 + (of.step() - 1.0) * of.maybe("lr_decay"));
    Ok(Rule::Adagrad { minus_rate: -rate as f32, eps: of.needed("eps")? as f32 })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_optimizer_has_a_row_for_import_and_one_for_its_numbers() {
        let imported: BTreeSet<&str> = RULES.iter().map(|row| row.kind).collect();
        assert_eq!(kinds().collect::<BTreeSet<_>>(), imported);
    }

    #[test]
    fn an_unknown_optimizer_is_an_error() {
        let values = [("lr".to_owned(), 0.1), ("eps".to_owned(), 1e-8)].into();
        let group = Group { class: "LAMB".to_owned(), values, ..Group::default() };
        let error = Step::new("neap::lamb", Some(&group), 0).unwrap_err();
        assert_eq!(error.to_string(), "the optimizer `neap::lamb` is not known");
    }

    #[test]
    fn extents_of_one_are_no_other_shape() {
        let view = |shape: &[usize], stride: &[usize]| View {
            data: std::ptr::null_mut(),
            dtype: crate::job::Dtype::F32,
            shape: shape.to_vec(),
            stride: stride.to_vec(),
        };
        let is = |of: View, like: &View, shape: &[usize], stride: &[usize]| {
            let found = alike(&of, like);
            assert_eq!((&found.shape[..], &found.stride[..]), (shape, stride));
        };
        is(view(&[1, 10], &[10, 2]), &view(&[10], &[1]), &[10], &[2]);
        is(view(&[3, 4], &[1, 3]), &view(&[3, 1, 4], &[4, 4, 1]), &[3, 1, 4], &[1, 4, 3]);
        is(view(&[4, 3], &[3, 1]), &view(&[3, 4], &[4, 1]), &[4, 3], &[3, 1]);
    }
}
