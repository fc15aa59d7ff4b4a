//! A brute-force interpreter of plans, for tests only: memory is an array of 512-byte blocks, each of which
//! remembers what was written to it. It runs a plan in any order that the waits allow and says what went wrong.
//! It reads the meaning of a plan from its text (`neap::contract::plan`) on its own, and is as slow as it is plain.

pub mod clock;
pub mod make;
mod read;

use crate::common::random::Random;
use neap::contract::{Place, Plan};
use neap::job::Graph;
use read::{Reading, Task, What};

/// A block: which content, and which part of it. Content 0 is a free block.
type Block = (u64, usize);

/// What stands in bytes that were begun to be written.
const SCRIBBLE: u64 = 1;

fn hash(a: u64, b: u64) -> u64 {
    Random(a.rotate_left(17) ^ b.wrapping_mul(0xd6e8_feb8_6659_fd93)).next() | 2
}

/// What an iteration writes when nothing is planned: `contents[tensor][version]`.
fn unplanned(graph: &Graph, start: &[u64]) -> Vec<Vec<u64>> {
    let mut contents: Vec<Vec<u64>> = start.iter().map(|c| vec![*c]).collect();
    for (index, op) in graph.operators.iter().enumerate() {
        let inputs: Vec<u64> = op
            .reads()
            .filter(|o| !read::skips(graph, index, o.tensor.index()))
            .map(|o| contents[o.tensor.index()][o.version as usize])
            .collect();
        for o in op.writes() {
            let content = result(index, o.tensor.index(), o.version, &inputs);
            let versions = &mut contents[o.tensor.index()];
            versions.truncate(o.version as usize);
            versions.push(content);
        }
    }
    contents
}

/// What an operator makes of its inputs.
fn result(operator: usize, tensor: usize, version: u32, inputs: &[u64]) -> u64 {
    inputs
        .iter()
        .fold(hash(operator as u64 + 77, hash(tensor as u64, u64::from(version))), |a, b| {
            hash(a, *b)
        })
}

/// Where everything is placed, in blocks, and what each place waits for.
struct Layout {
    /// For each stay and then for each task's workspace: first block, blocks.
    at: Vec<(usize, usize)>,
    /// For each of them: which of them must have ended before it begins.
    after: Vec<Vec<usize>>,
    blocks: usize,
}

/// When each stay and each workspace was held: start and end of both parts, in actions.
pub struct Held {
    pub begin: Vec<u64>,
    pub end: Vec<u64>,
}

pub struct Machine<'a> {
    plan: &'a Plan,
    graph: &'a Graph,
    reading: Reading,
    layout: Layout,
    contents: Vec<Vec<u64>>,
    memory: Vec<Block>,
    pool: Vec<Block>,
    /// For each task the copies that its slot in the pool makes it wait for.
    slot_after: Vec<Vec<usize>>,
    valid: Vec<bool>,
    started: Vec<bool>,
    ended: Vec<bool>,
    /// How many tasks of each lane have ended.
    fronts: [usize; 3],
    gone: Vec<bool>,
    /// What a running task read at its start.
    inputs: Vec<Vec<u64>>,
    held: Held,
    now: u64,
}

type Outcome<T> = Result<T, String>;

impl<'a> Machine<'a> {
    /// With the plan's placements, or (`None`) with a private place for everything.
    pub fn new(plan: &'a Plan, graph: &'a Graph, placed: bool) -> Outcome<Self> {
        let job = &plan.jobs[0];
        let reading = Reading::new(job, graph)?;
        let layout = if placed {
            Layout::new(plan, graph, &reading)?
        } else {
            Layout::private(graph, &reading)
        };
        let (stays, tasks) = (reading.stays.len(), reading.tasks.len());
        let start: Vec<u64> = (0..graph.tensors.len()).map(|t| hash(5, t as u64)).collect();
        Ok(Self {
            contents: unplanned(graph, &start),
            memory: vec![(0, 0); layout.blocks],
            slot_after: slot_after(plan, graph, &reading),
            pool: vec![(0, 0); (plan.device.pinned_bytes.0 / 512) as usize],
            valid: vec![false; graph.tensors.len()],
            started: vec![false; tasks],
            ended: vec![false; tasks],
            fronts: [0; 3],
            gone: vec![false; stays],
            inputs: vec![Vec::new(); tasks],
            held: Held { begin: vec![0; stays + tasks], end: vec![u64::MAX; stays + tasks] },
            now: 0,
            plan,
            graph,
            reading,
            layout,
        })
    }

    /// Two iterations, the second from where the first ended, in random orders. When everything was held in the second.
    pub fn run(mut self, random: &mut Random) -> Outcome<Held> {
        self.load()?;
        for iteration in 0..2 {
            let before: Vec<bool> = self.memory.iter().map(|b| b.0 != 0).collect();
            self.forget();
            // Lazy and eager engines, so that every order has a fair chance.
            let weights: [usize; 4] = std::array::from_fn(|_| [1, 6, 40][random.below(3)]);
            while self.act(random, &weights)? {}
            let after: Vec<bool> = self.memory.iter().map(|b| b.0 != 0).collect();
            if before != after {
                return Err("the device holds other bytes at the end than at the start".to_owned());
            }
            self.close(iteration)?;
        }
        Ok(self.held)
    }

    /// The state before the first iteration.
    fn load(&mut self) -> Outcome<()> {
        for t in 0..self.graph.tensors.len() {
            if self.reading.on_host[t] {
                let content = self.contents[t][0];
                self.store_host(t, content)?;
                self.valid[t] = true;
            }
        }
        for s in 0..self.reading.stays.len() {
            if self.reading.stays[s].begin.is_none() {
                self.occupy(s)?;
                let stay = &self.reading.stays[s];
                let content = self.contents[stay.tensor][0];
                self.store(s, content);
            }
        }
        Ok(())
    }

    /// Between iterations: nothing has run, and no host copy but those of the steady state.
    fn forget(&mut self) {
        self.started.fill(false);
        self.ended.fill(false);
        self.fronts = [0; 3];
        self.gone.fill(false);
        self.now = 0;
        for t in 0..self.graph.tensors.len() {
            if !self.reading.on_host[t] {
                self.valid[t] = false;
            }
        }
        self.sweep();
    }

    /// After an iteration: results as without a plan, and the contents the next one starts from.
    fn close(&mut self, iteration: u32) -> Outcome<()> {
        let mut start = Vec::new();
        for t in 0..self.graph.tensors.len() {
            let last = *self.contents[t].last().unwrap_or(&0);
            start.push(last);
            if self.reading.generated[t] {
                continue;
            }
            let found = if self.reading.on_host[t] {
                if !self.valid[t] {
                    return Err(format!(
                        "t{t} ends iteration {iteration} without a valid host copy"
                    ));
                }
                self.load_host(t)?
            } else {
                let Some(s) = self.reading.stays.iter().position(|s| s.tensor == t && s.stays)
                else {
                    return Err(format!("t{t} ends iteration {iteration} off the device"));
                };
                self.fetch(s)?
            };
            if found != last {
                return Err(format!("t{t} ends iteration {iteration} with a wrong value"));
            }
        }
        self.contents = unplanned(self.graph, &start);
        Ok(())
    }

    /// Starts or ends something. False when all is done.
    fn act(&mut self, random: &mut Random, weights: &[usize; 4]) -> Outcome<bool> {
        let mut choices: [(usize, bool); 6] = [(0, false); 6];
        let mut count = 0;
        let mut total = 0;
        let mut odds = [0; 6];
        let mut open = false;
        for lane in 0..3 {
            let Some(task) = self.front(lane) else { continue };
            open = true;
            let running = self.started[task];
            if running || self.may_start(task) {
                choices[count] = (task, running);
                odds[count] = if running { weights[lane] } else { weights[3] };
                total += odds[count];
                count += 1;
            }
        }
        if count == 0 {
            return if open { Err("deadlock".to_owned()) } else { Ok(false) };
        }
        let mut at = random.below(total);
        let mut choice = 0;
        while at >= odds[choice] {
            at -= odds[choice];
            choice += 1;
        }
        self.now += 1;
        match choices[choice] {
            (task, true) => self.finish(task)?,
            (task, false) => self.start(task)?,
        }
        Ok(true)
    }

    /// The first task of a lane (compute, out, in) that has not ended.
    fn front(&self, lane: usize) -> Option<usize> {
        self.reading.lanes[lane].get(self.fronts[lane]).copied()
    }

    /// Whether what a task waits for is over.
    fn may_start(&self, task: usize) -> bool {
        let what = &self.reading.tasks[task];
        let done = |t: &usize| self.ended[*t];
        what.before.iter().all(done)
            && self.slot_after[task].iter().all(done)
            && self.reading.earlier[task].iter().all(|e| self.over(*e))
            && self.reading.begun[task]
                .iter()
                .all(|p| self.layout.after[*p].iter().all(|e| self.place_over(*e)))
    }

    /// Whether a stay is over.
    fn over(&self, stay: usize) -> bool {
        let stay = &self.reading.stays[stay];
        !stay.stays && stay.lasts.iter().all(|t| self.ended[*t])
    }

    fn place_over(&self, place: usize) -> bool {
        match place.checked_sub(self.reading.stays.len()) {
            None => self.over(place),
            Some(task) => self.ended[task],
        }
    }

    /// Frees the bytes of all stays that are over.
    fn sweep(&mut self) {
        for s in 0..self.reading.stays.len() {
            let begun = self.reading.stays[s].begin.is_none_or(|t| self.started[t]);
            if begun && !self.gone[s] && self.over(s) {
                self.gone[s] = true;
                self.held.end[s] = self.now;
                self.free(s);
            }
        }
    }

    fn start(&mut self, task: usize) -> Outcome<()> {
        self.started[task] = true;
        self.sweep();
        for i in 0..self.reading.begun[task].len() {
            self.occupy(self.reading.begun[task][i])?;
        }
        let Task { what, reads, updates, .. } = self.reading.tasks[task].clone();
        self.inputs[task].clear();
        match what {
            What::Step(..) => {
                for (stay, version) in &reads {
                    let content = self.expect(*stay, *version)?;
                    self.inputs[task].push(content);
                }
                for (stay, version) in &updates {
                    self.expect(*stay, version - 1)?;
                }
                for (stay, _) in &updates {
                    self.store(*stay, SCRIBBLE);
                }
            }
            What::Out(tensor, stay) => {
                let content = self.fetch(stay)?;
                self.inputs[task].push(content);
                self.store_host(tensor, SCRIBBLE)?;
            }
            What::In(tensor, _) => {
                if !self.valid[tensor] {
                    return Err(format!("swap-in of t{tensor} without a valid host copy"));
                }
                let content = self.load_host(tensor)?;
                self.inputs[task].push(content);
            }
        }
        Ok(())
    }

    fn finish(&mut self, task: usize) -> Outcome<()> {
        let Task { what, reads, updates, makes, .. } = self.reading.tasks[task].clone();
        let inputs = std::mem::take(&mut self.inputs[task]);
        match what {
            What::Step(operator, _) => {
                for ((stay, _), content) in reads.iter().zip(&inputs) {
                    if !updates.iter().any(|u| u.0 == *stay) && self.fetch(*stay)? != *content {
                        return Err(format!("an input of operator {operator} changed under it"));
                    }
                }
                for (stay, version) in updates.iter().chain(&makes) {
                    let tensor = self.reading.stays[*stay].tensor;
                    self.store(*stay, result(operator, tensor, *version, &inputs));
                    self.valid[tensor] = false;
                }
            }
            What::Out(tensor, stay) => {
                if self.fetch(stay)? != inputs[0] {
                    return Err(format!("t{tensor} changed while it was copied out"));
                }
                self.store_host(tensor, inputs[0])?;
                self.valid[tensor] = true;
            }
            What::In(tensor, stay) => {
                if self.load_host(tensor)? != inputs[0] {
                    return Err(format!(
                        "the host copy of t{tensor} changed while it was copied in"
                    ));
                }
                self.store(stay, inputs[0]);
            }
        }
        self.ended[task] = true;
        let lane = self.reading.lanes.iter().position(|l| l.contains(&task)).unwrap_or(0);
        self.fronts[lane] += 1;
        let workspace = self.reading.stays.len() + task;
        self.held.end[workspace] = self.now;
        self.free(workspace);
        self.sweep();
        Ok(())
    }

    fn expect(&self, stay: usize, version: u32) -> Outcome<u64> {
        let tensor = self.reading.stays[stay].tensor;
        let content = self.fetch(stay)?;
        if content == self.contents[tensor][version as usize] {
            Ok(content)
        } else {
            Err(format!("t{tensor} read in a wrong version"))
        }
    }

    fn occupy(&mut self, place: usize) -> Outcome<()> {
        let (at, count) = self.layout.at[place];
        self.held.begin[place] = self.now;
        let blocks = self.memory.get_mut(at..at + count).ok_or("bytes outside the arena")?;
        if blocks.iter().any(|b| b.0 != 0) {
            return Err("bytes are taken that are not free".to_owned());
        }
        blocks.fill((SCRIBBLE, 0));
        Ok(())
    }

    fn free(&mut self, place: usize) {
        let (at, count) = self.layout.at[place];
        self.memory[at..at + count].fill((0, 0));
    }

    fn store(&mut self, stay: usize, content: u64) {
        let (at, count) = self.layout.at[stay];
        for (i, block) in self.memory[at..at + count].iter_mut().enumerate() {
            *block = (content, i);
        }
    }

    fn fetch(&self, stay: usize) -> Outcome<u64> {
        let (at, count) = self.layout.at[stay];
        whole(&self.memory[at..at + count])
    }

    fn slot(&self, tensor: usize) -> Outcome<std::ops::Range<usize>> {
        let id = neap::units::TensorId::from_index(tensor);
        let offset = self.plan.jobs[0]
            .host_slots
            .get(&id)
            .ok_or_else(|| format!("t{tensor} has no slot"))?
            .0;
        let (start, count) =
            ((offset / 512) as usize, self.graph.tensors[tensor].bytes.0.div_ceil(512) as usize);
        if start.saturating_add(count) > self.pool.len() {
            Err("bytes outside the pinned pool".to_owned())
        } else {
            Ok(start..start + count)
        }
    }

    fn store_host(&mut self, tensor: usize, content: u64) -> Outcome<()> {
        let range = self.slot(tensor)?;
        for (i, block) in self.pool[range].iter_mut().enumerate() {
            *block = (content, i);
        }
        Ok(())
    }

    fn load_host(&self, tensor: usize) -> Outcome<u64> {
        whole(&self.pool[self.slot(tensor)?])
    }
}

/// The content of blocks that belong together.
fn whole(blocks: &[Block]) -> Outcome<u64> {
    let content = blocks.first().map_or(SCRIBBLE, |b| b.0);
    let torn = blocks.iter().enumerate().any(|(i, b)| *b != (content, i));
    if torn || content <= SCRIBBLE { Err("garbage is read".to_owned()) } else { Ok(content) }
}

impl Layout {
    fn new(plan: &Plan, graph: &Graph, reading: &Reading) -> Outcome<Self> {
        let sizes = sizes(graph, reading);
        let mut at = vec![None; sizes.len()];
        // For each place its turn in the list.
        let mut turn = vec![usize::MAX; sizes.len()];
        let names = reading.places(&sizes);
        for (position, placement) in plan.jobs[0].placements.iter().enumerate() {
            let mut found = false;
            for (place, what) in names.iter().enumerate() {
                if *what == Some(placement.place) {
                    if at[place].replace((placement.offset.0 / 512) as usize).is_some() {
                        return Err("structure: placed twice".to_owned());
                    }
                    // What is there at the start stands before the list.
                    turn[place] = if reading.stays.get(place).is_some_and(|s| s.begin.is_none()) {
                        0
                    } else {
                        position + 1
                    };
                    found = true;
                }
            }
            if !found {
                return Err("structure: a placement of nothing".to_owned());
            }
        }
        let blocks = (plan.budget.0 / 512) as usize;
        let mut places = Vec::new();
        for (place, size) in sizes.iter().enumerate() {
            match at[place] {
                Some(at) => places.push((at, *size)),
                None if *size == 0 => places.push((0, 0)),
                None => return Err("structure: no placement".to_owned()),
            }
        }
        let shares = |a: usize, b: usize| {
            let ((a, m), (b, n)) = (places[a], places[b]);
            m > 0 && n > 0 && a < b + n && b < a + m
        };
        let earlier = |place: usize| {
            (0..sizes.len()).filter(|p| turn[*p] < turn[place] && shares(*p, place)).collect()
        };
        let after = (0..sizes.len()).map(earlier).collect();
        Ok(Self { at: places, after, blocks })
    }

    fn private(graph: &Graph, reading: &Reading) -> Self {
        let sizes = sizes(graph, reading);
        let mut at: Vec<(usize, usize)> = Vec::new();
        let mut blocks = 0;
        for (place, size) in sizes.iter().enumerate() {
            // Both parts of what stays round the end are at one address.
            let twin = reading.stays.get(place).and_then(|s| {
                reading.stays[..place]
                    .iter()
                    .position(|e| e.tensor == s.tensor && e.number == s.number)
            });
            at.push(twin.map_or((blocks, *size), |t| at[t]));
            blocks += size;
        }
        Self { after: vec![Vec::new(); at.len()], at, blocks }
    }
}

/// A tensor's first copy waits for all copies of tensors that had bytes of its slot before.
fn slot_after(plan: &Plan, graph: &Graph, reading: &Reading) -> Vec<Vec<usize>> {
    let copied = |task: &usize| match reading.tasks[*task].what {
        What::Step(..) => None,
        What::Out(tensor, _) | What::In(tensor, _) => Some(tensor),
    };
    let copies =
        |tensor: usize| (0..reading.tasks.len()).filter(move |t| copied(t) == Some(tensor));
    let slot = |tensor: usize| {
        let start = plan.jobs[0].host_slots.get(&neap::units::TensorId::from_index(tensor))?.0;
        Some((start, start.saturating_add(graph.tensors[tensor].bytes.in_blocks().0)))
    };
    let shares = |a: usize, b: usize| matches!((slot(a), slot(b)), (Some(a), Some(b)) if a.0 < b.1 && b.0 < a.1 && a.0 < a.1 && b.0 < b.1);
    let waits = |task: usize| {
        let Some(tensor) = copied(&task).filter(|t| copies(*t).next() == Some(task)) else {
            return Vec::new();
        };
        let before = |other: &usize| {
            *other != tensor && shares(*other, tensor) && copies(*other).all(|c| c < task)
        };
        (0..graph.tensors.len()).filter(before).flat_map(copies).collect()
    };
    (0..reading.tasks.len()).map(waits).collect()
}

/// Blocks of each stay, then of each task's workspace.
pub fn sizes(graph: &Graph, reading: &Reading) -> Vec<usize> {
    let blocks = |bytes: u64| bytes.div_ceil(512) as usize;
    let stays = reading.stays.iter().map(|s| blocks(graph.tensors[s.tensor].bytes.0));
    let workspaces = reading.tasks.iter().map(|task| match &task.what {
        What::Step(operator, scratch) => {
            blocks(graph.operators[*operator].workspace.0)
                + scratch.iter().map(|t| blocks(graph.tensors[*t].bytes.0)).sum::<usize>()
        }
        _ => 0,
    });
    stays.chain(workspaces).collect()
}

impl Reading {
    /// What the plan calls each stay and workspace; `None` for a workspace of nothing.
    fn places(&self, sizes: &[usize]) -> Vec<Option<Place>> {
        let stays = self.stays.iter().map(|s| {
            Some(Place::Tensor {
                tensor: neap::units::TensorId::from_index(s.tensor),
                residency: s.number,
            })
        });
        let workspaces = (0..self.tasks.len()).map(|task| {
            let step = self.lanes[0].iter().position(|t| *t == task)?;
            (sizes[self.stays.len() + task] > 0).then_some(Place::Workspace { step: step as u32 })
        });
        stays.chain(workspaces).collect()
    }
}
