//! Proves that no task waits for ever. Every wait is for a fixed set of starts and ends, so it is
//! enough that tasks do not wait for each other in a circle.

use super::Refusals;
use super::program::{Program, Why};
use super::refusal::Refusal;

/// Refuses a plan with a circle, and names the tasks in it.
pub(super) fn prove(program: &Program, refusals: &mut Refusals) {
    let tasks = &program.tasks;
    let mut followers = vec![Vec::new(); tasks.len()];
    let mut pending: Vec<usize> = tasks.iter().map(|t| t.waits.len()).collect();
    for (task, what) in tasks.iter().enumerate() {
        for wait in &what.waits {
            followers[wait.task].push(task);
        }
    }
    let mut ready: Vec<usize> = (0..tasks.len()).filter(|t| pending[*t] == 0).collect();
    while let Some(task) = ready.pop() {
        for &next in &followers[task] {
            pending[next] -= 1;
            if pending[next] == 0 {
                ready.push(next);
            }
        }
    }
    // Each remaining task waits for another remaining one, so following the waits leads into a
    // circle.
    let Some(mut at) = (0..tasks.len()).find(|t| pending[*t] > 0) else { return };
    let mut seen = vec![usize::MAX; tasks.len()];
    let mut path = Vec::new();
    while seen[at] == usize::MAX {
        seen[at] = path.len();
        let Some(wait) = tasks[at].waits.iter().find(|w| pending[w.task] > 0) else { break };
        path.push((at, wait));
        at = wait.task;
    }
    let start = seen[at].min(path.len());
    let circle = path[start..].iter().map(|(task, wait)| {
        let (one, other) = (program.task(*task), program.task(wait.task));
        match wait.why {
            Why::Program => format!("{one} runs after {other}"),
            Why::Queue => format!("{one} is queued behind {other}"),
            Why::Trigger => format!("{one} is triggered by the end of {other}"),
            Why::Data(tensor) => format!("{one} needs `{}` from {other}", program.tensor(tensor)),
            Why::Earlier(tensor) => format!("{one} waits for `{}` to leave, at the end of {other}", program.tensor(tensor)),
            Why::Pool(tensor) => {
                format!("{one} waits for the slot of `{}` in the pinned pool, held to the end of {other}", program.tensor(tensor))
            }
            Why::Window => format!("{one} waits for the window, held to the end of {other}"),
            Why::Address(place, offset) => {
                format!("{one} waits for the bytes from offset {offset} of {}, held to the end of {other}", program.place(place))
            }
        }
    });
    refusals.add(Refusal::Deadlock { circle: circle.collect() });
}
