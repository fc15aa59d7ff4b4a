//! The hyperparameters of each parameter, from the trace's marks or from the scalars of the step.

use std::collections::BTreeMap;

use super::Step;
use super::recover::{Recovered, recover};
use crate::job::Graph;
use crate::job::optimizer::{Group, Rule};
use crate::units::TensorId;

/// A marked and a recovered rate are different if they differ by more than this share and 2e-6.
const APART: f64 = 0.05;

/// The group of each parameter of step `number`. Notes say what is assumed.
///
/// # Errors
/// When the step must stay as recorded; the error says why.
pub(super) fn groups(
    graph: &Graph,
    step: &Step,
    number: u16,
    notes: &mut Vec<String>,
) -> Result<Vec<(TensorId, Group)>, String> {
    let known = |class: &str| Rule::of_class(class).map(drop).ok_or_else(|| unknown(class));
    let own = || step.columns.iter().filter(|c| c.step == number).map(|c| c.parameter);
    let marked: BTreeMap<TensorId, &Group> = step
        .marked
        .iter()
        .flat_map(|(group, parameters)| parameters.iter().map(move |p| (*p, group)))
        .collect();
    if own().all(|p| marked.contains_key(&p)) {
        let mut of = Vec::new();
        for parameter in own() {
            known(&marked[&parameter].class)?;
            of.push((parameter, marked[&parameter].clone()));
        }
        return Ok(of);
    }
    let recorded = step.recorded.as_ref().filter(|r| match step.class(number) {
        Some(class) => class == r.class || step.numbers().len() == 1,
        None => true,
    });
    known(recorded.map(|r| r.class.as_str()).or(step.class(number)).unwrap_or("SGD"))?;
    let recovered = recover(graph, step, number);
    if recovered.is_empty() {
        return Err(
            "no operator of the optimizer's step updates a parameter; it stays as recorded".into(),
        );
    }
    match recorded {
        Some(recorded) => Ok(adjusted(recorded, &recovered, own(), notes)),
        None => from_scalars(recovered, notes),
    }
}

/// The groups of all parameters, from the step's scalars only.
fn from_scalars(
    recovered: Vec<Recovered>,
    notes: &mut Vec<String>,
) -> Result<Vec<(TensorId, Group)>, String> {
    let mut of = Vec::new();
    let mut distinct: Vec<Group> = Vec::new();
    for (parameters, group) in recovered {
        let group = group?;
        if !distinct.contains(&group) {
            distinct.push(group.clone());
        }
        of.extend(parameters.into_iter().map(|p| (p, group.clone())));
    }
    for group in distinct {
        let values: Vec<String> = group.values.iter().map(|(k, v)| format!("{k} {v}")).collect();
        notes.push(format!(
            "the optimizer's hyperparameters are not recorded; recovered from scalars rounded to six decimals (a smaller eps is the framework's default): {} with {}",
            group.class,
            values.join(", ")
        ));
    }
    Ok(of)
}

/// The values recorded for the whole optimizer are its defaults. If the step's scalars show several
/// groups, each group takes the values of its own scalars. With one group the recorded values stay.
fn adjusted(
    recorded: &Group,
    recovered: &[Recovered],
    parameters: impl Iterator<Item = TensorId>,
    notes: &mut Vec<String>,
) -> Vec<(TensorId, Group)> {
    let seen: Vec<&Group> = recovered.iter().filter_map(|(_, g)| g.as_ref().ok()).collect();
    let several = seen.windows(2).any(|pair| pair[0].values != pair[1].values);
    if !several {
        let rate = seen.first().and_then(|g| g.values.get("lr"));
        if let (Some(stated), Some(used)) = (recorded.values.get("lr"), rate)
            && apart(*stated, *used)
        {
            notes.push(format!("the optimizer is recorded with lr {stated}, but its step used about {used}; lr {stated} is kept"));
        }
        return parameters.map(|p| (p, recorded.clone())).collect();
    }
    notes.push("the optimizer has parameter groups that the trace does not mark; what differs between them is recovered from rounded scalars: record with `neap.group` marks for exact values".to_owned());
    let own = |parameter: TensorId| {
        let set = recovered.iter().find(|(of, _)| of.binary_search(&parameter).is_ok())?;
        set.1.as_ref().ok()
    };
    let adjust = |parameter: TensorId| {
        let mut group = recorded.clone();
        for (key, used) in own(parameter).into_iter().flat_map(|g| &g.values) {
            let stated = group.values.get(key).copied();
            // A small eps cannot be seen in rounded scalars.
            if key != "eps" && stated.is_none_or(|stated| apart(stated, *used)) {
                group.values.insert(key.clone(), *used);
                group.recovered = true;
            }
        }
        (parameter, group)
    };
    parameters.map(adjust).collect()
}

fn apart(stated: f64, used: f64) -> bool {
    (stated - used).abs() > APART * stated.abs() + 2e-6
}

/// The reason why an optimizer of this class stays as recorded.
pub(super) fn unknown(class: &str) -> String {
    format!(
        "optimizer {class} is not recognised; its operators stay as recorded and its scalars are frozen at the recorded step"
    )
}
