//! The interpreter's own reading of a plan: tasks in program order and each tensor's stays on the device.

use neap::contract::{Event, JobPlan};
use neap::job::{Graph, Replay};

/// A step or a copy.
#[derive(Clone)]
pub struct Task {
    pub what: What,
    /// Tasks that must have ended before it starts (the one before it in its lane, its trigger, what it reads).
    pub before: Vec<usize>,
    /// A step: stays and versions.
    pub reads: Vec<(usize, u32)>,
    pub updates: Vec<(usize, u32)>,
    pub makes: Vec<(usize, u32)>,
    /// A step: swap-ins that it waits for.
    pub wants: Vec<usize>,
    /// The operator of its trigger.
    pub trigger: Option<usize>,
}

#[derive(Clone)]
pub enum What {
    /// An operator, and what it generates into its workspace.
    Step(usize, Vec<usize>),
    /// A tensor and its stay.
    Out(usize, usize),
    /// A tensor and the stay that it begins.
    In(usize, usize),
}

/// A stay of a tensor on the device.
pub struct Stay {
    pub tensor: usize,
    pub number: u32,
    /// The task that begins it.
    pub begin: Option<usize>,
    /// It ends when all of these have.
    pub lasts: Vec<usize>,
    /// Or when this step starts.
    /// Or not in this iteration.
    pub stays: bool,
    steps: Vec<usize>,
    out: Option<usize>,
    released: bool,
}

pub struct Reading {
    pub tasks: Vec<Task>,
    pub stays: Vec<Stay>,
    /// Compute, out, in.
    pub lanes: [Vec<usize>; 3],
    pub on_host: Vec<bool>,
    pub generated: Vec<bool>,
    /// For each operator its task.
    pub runs: Vec<usize>,
    /// For each task the places that it begins: stays, then its workspace (counted after all stays).
    pub begun: Vec<Vec<usize>>,
    /// For each task the earlier stays of the tensors that it begins a stay for.
    pub earlier: Vec<Vec<usize>>,
}

/// Whether a recompute of the operator leaves the tensor alone.
pub fn skips(graph: &Graph, operator: usize, tensor: usize) -> bool {
    let op = &graph.operators[operator];
    if op.replay != Replay::SkipUpdates {
        return false;
    }
    let made = graph.operators.iter().any(|o| o.generates().any(|g| g.tensor.index() == tensor));
    !made && op.updates().any(|u| u.tensor.index() == tensor)
}

impl Reading {
    pub fn new(job: &JobPlan, graph: &Graph) -> Result<Self, String> {
        let count = graph.tensors.len();
        let mut reading = Self {
            tasks: Vec::new(),
            stays: Vec::new(),
            lanes: Default::default(),
            on_host: vec![false; count],
            generated: graph.generators().iter().map(Option::is_some).collect(),
            runs: vec![usize::MAX; graph.operators.len()],
            begun: Vec::new(),
            earlier: Vec::new(),
        };
        let mut items: Vec<(Option<usize>, Option<usize>)> = Vec::new();
        let mut events = 0;
        for operator in std::iter::once(None).chain((0..graph.operators.len()).map(Some)) {
            if operator.is_some() {
                items.push((operator, None));
            }
            for (number, event) in job.events.iter().enumerate() {
                if event.trigger().after.map(|o| o.index()) == operator {
                    items.push((None, Some(number)));
                    if number != events {
                        return Err("structure: events out of order".to_owned());
                    }
                    events += 1;
                }
            }
        }
        if events != job.events.len() {
            return Err("structure: a trigger of no operator".to_owned());
        }
        for t in 0..count {
            if !reading.generated[t] {
                reading.on_host[t] = reading.host_first(job, graph, &items, t);
                if !reading.on_host[t] {
                    reading.stay(t, None);
                }
            }
        }
        for (operator, event) in items {
            match (operator, event.map(|e| &job.events[e])) {
                (Some(operator), _) => {
                    reading.runs[operator] = reading.tasks.len();
                    let made: Vec<usize> =
                        graph.operators[operator].generates().map(|o| o.tensor.index()).collect();
                    reading.step(graph, operator, false, &made)?;
                }
                (None, Some(Event::Recompute { operator, keep, .. })) => {
                    let keep: Vec<usize> = keep.iter().map(|t| t.index()).collect();
                    if graph.operators.len() <= operator.index()
                        || reading.runs[operator.index()] == usize::MAX
                    {
                        return Err("structure: a recompute that can't be".to_owned());
                    }
                    if graph.operators[operator.index()].replay == Replay::Never {
                        return Err("structure: never again".to_owned());
                    }
                    let makes = |t: &usize| {
                        graph.operators[operator.index()]
                            .generates()
                            .any(|o| o.tensor.index() == *t)
                    };
                    if !keep.iter().all(makes)
                        || (1..keep.len()).any(|i| keep[..i].contains(&keep[i]))
                    {
                        return Err("structure: what it keeps".to_owned());
                    }
                    reading.step(graph, operator.index(), true, &keep)?;
                }
                (None, Some(other)) => reading.event(other, count)?,
                (None, None) => {}
            }
        }
        reading.ends(graph);
        Ok(reading)
    }

    fn host_first(
        &self,
        job: &JobPlan,
        graph: &Graph,
        items: &[(Option<usize>, Option<usize>)],
        t: usize,
    ) -> bool {
        for (operator, event) in items {
            if operator.is_some_and(|o| graph.operators[o].touches().iter().any(|x| x.index() == t))
            {
                return false;
            }
            match event.map(|e| &job.events[e]) {
                Some(Event::SwapIn { tensor, .. }) if tensor.index() == t => return true,
                Some(Event::SwapOut { tensor, .. } | Event::Release { tensor, .. })
                    if tensor.index() == t =>
                {
                    return false;
                }
                _ => {}
            }
        }
        false
    }

    fn stay(&mut self, tensor: usize, begin: Option<usize>) -> usize {
        self.stays.push(Stay {
            tensor,
            number: 0,
            begin,
            lasts: Vec::new(),
            stays: false,
            steps: Vec::new(),
            out: None,
            released: false,
        });
        self.stays.len() - 1
    }

    /// The stay that a step here belongs to.
    fn open(&self, tensor: usize) -> Option<usize> {
        self.stays.iter().rposition(|s| s.tensor == tensor).filter(|s| !self.stays[*s].released)
    }

    fn task(&mut self, what: What, lane: usize) -> usize {
        let before = self.lanes[lane].last().copied().into_iter().collect();
        self.lanes[lane].push(self.tasks.len());
        self.tasks.push(Task {
            what,
            before,
            reads: Vec::new(),
            updates: Vec::new(),
            makes: Vec::new(),
            wants: Vec::new(),
            trigger: None,
        });
        self.tasks.len() - 1
    }

    fn vacant(&self, tensor: usize) -> Result<(), String> {
        match self.open(tensor) {
            Some(s) if self.stays[s].out.is_none() => {
                Err(format!("t{tensor} is on the device already"))
            }
            _ => Ok(()),
        }
    }

    fn step(
        &mut self,
        graph: &Graph,
        operator: usize,
        again: bool,
        keep: &[usize],
    ) -> Result<(), String> {
        let op = &graph.operators[operator];
        let scratch =
            op.generates().map(|o| o.tensor.index()).filter(|t| !keep.contains(t)).collect();
        let task = self.task(What::Step(operator, scratch), 0);
        let touched = |t: usize| !(again && skips(graph, operator, t));
        for o in op.reads().filter(|o| touched(o.tensor.index())) {
            let stay = self.belongs(task, o.tensor.index())?;
            // What a skipped update reads takes no part in the result, the first time either.
            if !skips(graph, operator, o.tensor.index()) {
                self.tasks[task].reads.push((stay, o.version));
            }
        }
        for o in op.updates().filter(|o| touched(o.tensor.index())) {
            let stay = self.belongs(task, o.tensor.index())?;
            if self.stays[stay].out.is_some() {
                return Err(format!("t{} is written after its swap-out", o.tensor.index()));
            }
            self.tasks[task].updates.push((stay, o.version));
        }
        for o in op.generates().filter(|o| keep.contains(&o.tensor.index())) {
            self.vacant(o.tensor.index())?;
            let stay = self.stay(o.tensor.index(), Some(task));
            self.stays[stay].steps.push(task);
            self.tasks[task].makes.push((stay, 0));
        }
        Ok(())
    }

    fn belongs(&mut self, task: usize, tensor: usize) -> Result<usize, String> {
        let stay = self.open(tensor).ok_or_else(|| format!("t{tensor} is not on the device"))?;
        self.stays[stay].steps.push(task);
        if let Some(begin) = self.stays[stay].begin {
            self.tasks[task].before.push(begin);
            if let What::In(..) = self.tasks[begin].what {
                self.tasks[task].wants.push(begin);
            }
        }
        Ok(stay)
    }

    fn event(&mut self, event: &Event, count: usize) -> Result<(), String> {
        let (Event::SwapOut { tensor, .. }
        | Event::SwapIn { tensor, .. }
        | Event::Release { tensor, .. }) = event
        else {
            return Ok(());
        };
        let t = tensor.index();
        if t >= count {
            return Err("structure: no such tensor".to_owned());
        }
        let trigger = event.trigger();
        let stay = self.open(t);
        if let Event::SwapIn { .. } = event {
            self.vacant(t)?;
            let begun = self.stays.len();
            let task = self.task(What::In(t, begun), 2);
            self.stay(t, Some(task));
            let out = self.tasks[..task]
                .iter()
                .rposition(|x| matches!(x.what, What::Out(o, _) if o == t));
            self.tasks[task].before.extend(out);
            if out.is_none() && !self.on_host[t] {
                return Err(format!("t{t} has no host copy"));
            }
            self.after(task, trigger.after.map(|o| o.index()));
            return Ok(());
        }
        let Some(stay) = stay.filter(|s| self.stays[*s].out.is_none()) else {
            return Err("structure: nothing to end".to_owned());
        };
        if let Event::Release { .. } = event {
            self.stays[stay].released = true;
            return Ok(());
        }
        let wrote = self.stays[stay].steps.iter().copied().filter(|s| {
            self.tasks[*s].updates.iter().chain(&self.tasks[*s].makes).any(|w| w.0 == stay)
        });
        let wrote = wrote.max().or(self.stays[stay].begin);
        let task = self.task(What::Out(t, stay), 1);
        self.tasks[task].before.extend(wrote);
        self.stays[stay].out = Some(task);
        self.after(task, trigger.after.map(|o| o.index()));
        Ok(())
    }

    fn after(&mut self, task: usize, operator: Option<usize>) {
        if let Some(operator) = operator {
            self.tasks[task].before.push(self.runs[operator]);
            self.tasks[task].trigger = Some(self.runs[operator]);
        }
    }

    /// When every stay ends, who stays round the end, and what placements call them.
    fn ends(&mut self, graph: &Graph) {
        for t in 0..graph.tensors.len() {
            let all: Vec<usize> =
                (0..self.stays.len()).filter(|s| self.stays[*s].tensor == t).collect();
            if let Some(&last) = all.last() {
                let ended = self.stays[last].released || self.stays[last].out.is_some();
                self.stays[last].stays = !ended && !self.generated[t];
            }
            // A tensor that stays round the end has its first stay at both ends.
            for (number, &s) in (0..).zip(&all) {
                self.stays[s].number = if self.stays[s].stays { 0 } else { number };
            }
        }
        for s in 0..self.stays.len() {
            let stay = &self.stays[s];
            let mut lasts: Vec<usize> = stay.steps.iter().copied().chain(stay.out).collect();
            lasts.extend(stay.begin);
            self.stays[s].lasts = lasts;
        }
        for task in 0..self.tasks.len() {
            let mut begun: Vec<usize> =
                (0..self.stays.len()).filter(|s| self.stays[*s].begin == Some(task)).collect();
            let tensor = |s: usize| self.stays[s].tensor;
            self.earlier.push(
                begun
                    .iter()
                    .flat_map(|s| (0..*s).filter(move |e| tensor(*e) == tensor(*s)))
                    .collect(),
            );
            begun.push(self.stays.len() + task);
            self.begun.push(begun);
        }
    }
}
