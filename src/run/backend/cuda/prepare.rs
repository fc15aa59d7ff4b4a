//! Everything that can be made before the first iteration: libraries, modules, launches,
//! descriptors, fused updates.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use cudarc::driver::sys::CUfunction;

use super::super::host::calls::operands;
use super::super::{Failure, Script, StepWork, Stream, Work};
use super::Options;
use super::conv::Cudnn;
use super::conv_product;
use super::driver::{Context, DeviceMemory, Module, PinnedMemory, Queue, Replay};
use super::emit;
use super::gemm::CublasLt;
use super::kernels::{self, Nvrtc};
use super::launch::{Action, Actions, Conv, Family, Gemm, Launch};
use super::libs::{self, Opened, Which};
use super::params::{One, Update};
use crate::backend::operators::error::{device_error, unsupported};
use crate::backend::operators::moves::Moves;
use crate::backend::operators::view::Call;
use crate::backend::operators::{KernelError, kept_input};
use crate::job::Graph;
use crate::units::{Bytes, OpId};

/// What to do about a plan for other algorithms.
const AGAIN: &str = "; profile and plan again with this device's libraries";

/// An action with its handles.
pub enum Ready {
    Launch(CUfunction, Launch),
    Copy { from: u64, to: u64, bytes: usize },
    Zero { to: u64, bytes: usize },
    Upload { to: u64, at: usize, bytes: usize },
    Library(Library, Replay),
}

/// A call of a library.
pub enum Library {
    Gemm(Box<super::gemm::Plan>),
    /// In the arena at this address; without one, in [`Prepared::scratch`].
    Conv(Box<super::conv::Plan>, Option<u64>),
}

impl From<Library> for Ready {
    fn from(call: Library) -> Self {
        Self::Library(call, Replay::First)
    }
}

/// The most that cuDNN may work in where the plan reserves nothing.
const CONV_SCRATCH: u64 = 256 << 20;

/// The most that cuBLASLt may work in: what NVIDIA advises for Hopper and later, and for others.
const fn gemm_scratch(compute_capability: u32) -> u64 {
    if compute_capability >= 90 { 32 << 20 } else { 8 << 20 }
}

impl Ready {
    /// How much it needs of [`Prepared::scratch`].
    fn beside(&self) -> u64 {
        match self {
            Self::Library(Library::Gemm(plan), _) => plan.workspace,
            Self::Library(Library::Conv(plan, None), _) => plan.workspace,
            Self::Launch(_, launch) => launch.beside.map_or(0, |(_, bytes)| bytes),
            _ => 0,
        }
    }
}

/// What a script needs.
pub struct Prepared {
    /// By item; none for copies and for updates that run with an earlier item.
    pub items: Vec<Vec<Ready>>,
    /// Updates that run together: items and how many elements each updates.
    pub fused: Vec<Vec<(usize, u64)>>,
    /// Batch data, as it goes to the device.
    pub uploads: Vec<u8>,
    /// As [`super::Cuda::algorithms`].
    pub algorithms: BTreeMap<OpId, Vec<(i32, Bytes)>>,
    /// Operators that neap's plain kernels carry out in the libraries' place.
    pub fallbacks: BTreeSet<OpId>,
    /// Where kernels work, and libraries for which the plan reserves nothing, beside the arena: as
    /// large as the largest of them wants it, since steps follow each other.
    pub scratch: DeviceMemory,
    /// For people.
    pub versions: String,
    pub cublaslt: Option<CublasLt>,
    pub cudnn: Option<Cudnn>,
    /// Outlives the functions of `items`.
    _modules: BTreeMap<Family, Module>,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for ready in self.items.iter().flatten() {
            let Ready::Library(call, _) = ready else { continue };
            match call {
                Library::Gemm(plan) => self.cublaslt.iter().for_each(|own| own.forget(plan)),
                Library::Conv(plan, _) => self.cudnn.iter().for_each(|own| own.forget(plan)),
            }
        }
    }
}

impl Prepared {
    #[allow(clippy::too_many_arguments, reason = "all that a device is made of")]
    pub fn new(
        graph: &Graph,
        script: &Script,
        batch: &[Vec<u8>],
        options: &Options,
        context: &Context,
        arena: &DeviceMemory,
        words: &PinnedMemory,
        compute: &Queue,
    ) -> Result<Self, Failure> {
        let device = |problem: String| Failure::Device(problem);
        let kernel = |problem: KernelError| Failure::Device(problem.to_string());
        let status = words.at(Bytes::ZERO, Bytes(8)).map_err(|f| device(f.0))?.cast::<i64>();
        let mut lists: Vec<Vec<Action>> = Vec::with_capacity(script.items.len());
        for item in &script.items {
            lists.push(match &item.work {
                Work::Step(work) => {
                    actions(graph, work, arena, batch, status, context.capability >= 80)?
                }
                Work::Copy { .. } => Vec::new(),
            });
        }
        let fused = fuse(script, &mut lists);
        let any = |wanted: fn(&Action) -> bool| lists.iter().flatten().any(wanted);
        let folders = libs::folders(options.libs.as_deref());
        let open = |which: Which| libs::open(which, &folders).map_err(|e| device(e.to_string()));
        let mut opened: Vec<Opened> = Vec::new();
        let cublaslt =
            if any(|a| matches!(a, Action::Gemm(_))) || any(|a| matches!(a, Action::Conv(_))) {
                let library = open(Which::CublasLt)?;
                opened.push(library);
                Some(CublasLt::new(&library, options.tf32).map_err(kernel)?)
            } else {
                None
            };
        let cudnn = if any(|a| matches!(a, Action::Conv(_))) {
            let library = open(Which::Cudnn)?;
            opened.push(library);
            // SAFETY: the stream is of the current context, and the device drops it after this.
            Some(unsafe { Cudnn::new(&library, compute.raw(), options.tf32) }.map_err(kernel)?)
        } else {
            None
        };
        let versions: Vec<String> =
            opened.iter().map(|o| format!("{} {}", o.which.name(), o.version)).collect();
        let families: BTreeSet<Family> =
            lists.iter().flatten().filter_map(Action::family).collect();
        let mut maker = Maker {
            context,
            folders: &folders,
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            uploads: Vec::new(),
        };
        maker.load(families).map_err(kernel)?;
        let mut prepared = Self {
            items: Vec::with_capacity(lists.len()),
            fused,
            uploads: Vec::new(),
            algorithms: BTreeMap::new(),
            fallbacks: BTreeSet::new(),
            scratch: context.allocate(Bytes::ZERO).map_err(|f| device(f.0))?,
            versions: versions.join(", "),
            cublaslt,
            cudnn,
            _modules: BTreeMap::new(),
        };
        for (item, list) in script.items.iter().zip(lists) {
            // In place from the start, so that what was made is given back if a later step fails.
            prepared.items.push(Vec::with_capacity(list.len()));
            let Work::Step(work) = &item.work else { continue };
            let mut passes = Vec::new();
            for action in list {
                let ready = prepared.ready(&mut maker, action, work, arena, options, &mut passes);
                let ready = ready
                    .map_err(|problem| Failure::Operator { operator: work.operator, problem })?;
                if let Some(last) = prepared.items.last_mut() {
                    last.extend(ready);
                }
            }
            // A recompute chooses as the operator did: it has the same workspace.
            if !passes.is_empty() {
                prepared.algorithms.entry(work.operator).or_insert(passes);
            }
        }
        let scratch = prepared.items.iter().flatten().map(Ready::beside).max().unwrap_or(0);
        prepared.scratch = context.allocate(Bytes(scratch)).map_err(|f| device(f.0))?;
        let at = prepared.scratch.at(Bytes::ZERO, Bytes::ZERO).map_err(|f| device(f.0))?;
        for ready in prepared.items.iter_mut().flatten() {
            if let Ready::Launch(_, launch) = ready {
                launch.place(at);
            }
        }
        (prepared.uploads, prepared._modules) = (maker.uploads, maker.modules);
        Ok(prepared)
    }

    fn ready(
        &mut self,
        maker: &mut Maker<'_>,
        action: Action,
        work: &StepWork,
        arena: &DeviceMemory,
        options: &Options,
        passes: &mut Vec<(i32, Bytes)>,
    ) -> Result<Vec<Ready>, KernelError> {
        Ok(vec![match action {
            Action::Launch(launch) => {
                if launch.family == Family::Matrix {
                    self.fallbacks.insert(work.operator);
                }
                maker.launch(launch)?
            }
            Action::Copy { from, to, bytes } => {
                Ready::Copy { from: from.addr() as u64, to: to.addr() as u64, bytes }
            }
            Action::Zero { to, bytes } => Ready::Zero { to: to.addr() as u64, bytes },
            Action::Upload { to, data } => {
                // Aligned, so that each can be copied at full speed.
                let at = maker.uploads.len().next_multiple_of(512);
                maker.uploads.resize(at, 0);
                let bytes = data.len();
                maker.uploads.extend(data);
                Ready::Upload { to: to.addr() as u64, at, bytes }
            }
            Action::Gemm(gemm) => return self.product(maker, &gemm, work),
            Action::Conv(conv) => {
                return self.convolution(maker, &conv, work, arena, options, passes);
            }
        }])
    }

    /// A convolution by the library that the plan names for it, or else by a product where that is
    /// quicker, by cuDNN, or by the plain kernels.
    #[allow(clippy::too_many_arguments, reason = "as `ready`")]
    fn convolution(
        &mut self,
        maker: &mut Maker<'_>,
        conv: &Conv,
        work: &StepWork,
        arena: &DeviceMemory,
        options: &Options,
        passes: &mut Vec<(i32, Bytes)>,
    ) -> Result<Vec<Ready>, KernelError> {
        let at = work.workspace.map(|(offset, size)| arena.at(offset, size)).transpose()?;
        let size = work.workspace.map_or(Bytes(CONV_SCRATCH), |w| w.1);
        let wanted = match options.algorithms.get(&work.operator).map(|all| all.get(passes.len())) {
            Some(None) => {
                return Err(device_error!(
                    "the plan names {} algorithms, which is too few{AGAIN}",
                    passes.len()
                ));
            }
            wanted => wanted.flatten().copied(),
        };
        if wanted.is_none_or(|wanted| wanted == conv_product::ALGORITHM)
            && let Some(ready) = self.as_product(maker, conv, at, size)?
        {
            passes.push((conv_product::ALGORITHM, Bytes(conv_product::partial_bytes(conv))));
            return Ok(ready);
        }
        let plan = match wanted {
            Some(-1) => None,
            _ => self
                .cudnn
                .as_ref()
                .map(|library| library.plan(conv, size.0, wanted))
                .transpose()?
                .flatten(),
        };
        if let Some(plan) = plan {
            passes.push((plan.algorithm, Bytes(plan.workspace)));
            return Ok(vec![Library::Conv(Box::new(plan), at).into()]);
        }
        if let Some(wanted) = wanted.filter(|&w| w >= 0) {
            return Err(device_error!(
                "the plan was made for algorithm {wanted}, which the libraries do not have for \
                 it in {size}{AGAIN}"
            ));
        }
        passes.push((-1, Bytes::ZERO));
        self.fallbacks.insert(work.operator);
        Ok(vec![maker.launch(conv.plain())?])
    }

    /// A convolution as products, in the plan's workspace at `at`.
    fn as_product(
        &self,
        maker: &mut Maker<'_>,
        conv: &Conv,
        at: Option<u64>,
        size: Bytes,
    ) -> Result<Option<Vec<Ready>>, KernelError> {
        let Some(library) = &self.cublaslt else { return Ok(None) };
        let needs = conv_product::partial_bytes(conv);
        // Memory beside the arena is what the library works in meanwhile.
        let partial = match at {
            Some(at) if needs <= size.0 => at as *mut u8,
            _ if needs == 0 => std::ptr::null_mut(),
            _ => return Ok(None),
        };
        let Some(gemm) = conv_product::product(conv, partial) else { return Ok(None) };
        let most = gemm_scratch(maker.context.capability);
        let Some(plan) = library.plan(&gemm, most)? else { return Ok(None) };
        let mut ready = vec![Library::Gemm(Box::new(plan)).into()];
        if needs > 0 {
            let mut sum = Actions::new(std::ptr::null_mut(), 0);
            conv_product::join(conv, partial, &mut sum)?;
            for action in sum.list {
                let Action::Launch(launch) = action else { return Ok(None) };
                ready.push(maker.launch(launch)?);
            }
        }
        Ok(Some(ready))
    }

    /// A product by the library: with its bias; or, where the library can't add one, added to the
    /// bias, which a kernel has put into every row of the result. Else by the plain kernel.
    fn product(
        &mut self,
        maker: &mut Maker<'_>,
        gemm: &Gemm,
        work: &StepWork,
    ) -> Result<Vec<Ready>, KernelError> {
        let most = gemm_scratch(maker.context.capability);
        if let Some(library) = &self.cublaslt {
            if let Some(plan) = library.plan(gemm, most)? {
                return Ok(vec![Library::Gemm(Box::new(plan)).into()]);
            }
            if let Some((spread, rest)) = gemm.bias_first()? {
                let spread = maker.launch(spread)?;
                if let Some(plan) = library.plan(&rest, most)? {
                    return Ok(vec![spread, Library::Gemm(Box::new(plan)).into()]);
                }
            }
        }
        self.fallbacks.insert(work.operator);
        Ok(vec![maker.launch(gemm.plain()?)?])
    }
}

/// Makes functions of launches.
struct Maker<'a> {
    context: &'a Context,
    folders: &'a [PathBuf],
    modules: BTreeMap<Family, Module>,
    functions: BTreeMap<String, CUfunction>,
    uploads: Vec<u8>,
}

impl Maker<'_> {
    fn load(&mut self, families: BTreeSet<Family>) -> Result<(), KernelError> {
        let open = || Nvrtc::open(self.folders).map_err(|e| e.to_string());
        let code =
            kernels::code(families, &self.context.arch, open).map_err(KernelError::Device)?;
        for (family, code) in code {
            self.modules.insert(family, self.context.load(&code)?);
        }
        Ok(())
    }

    fn launch(&mut self, launch: Launch) -> Result<Ready, KernelError> {
        if let Some(&function) = self.functions.get(&launch.kernel) {
            return Ok(Ready::Launch(function, launch));
        }
        if !self.modules.contains_key(&launch.family) {
            self.load([launch.family].into())?;
        }
        let module = self.modules.get(&launch.family).ok_or("a module that was just loaded")?;
        let function = module.kernel(&launch.kernel, launch.shared)?;
        self.functions.insert(launch.kernel.clone(), function);
        Ok(Ready::Launch(function, launch))
    }
}

/// A step's actions, with addresses of the device.
fn actions(
    graph: &Graph,
    work: &StepWork,
    arena: &DeviceMemory,
    batch: &[Vec<u8>],
    status: *mut i64,
    ampere: bool,
) -> Result<Vec<Action>, Failure> {
    let at = |offset: Bytes, size: Bytes| {
        Some(std::ptr::without_provenance_mut(usize::try_from(arena.at(offset, size).ok()?).ok()?))
    };
    let seen = operands(graph, work, &at)?;
    emitted(graph, work, &seen, batch, status, ampere)
}

/// A step's actions by what it sees; whether the GPU is as [`Actions::ampere`] says.
pub fn emitted(
    graph: &Graph,
    work: &StepWork,
    seen: &super::super::host::calls::Operands,
    batch: &[Vec<u8>],
    status: *mut i64,
    ampere: bool,
) -> Result<Vec<Action>, Failure> {
    let operator = graph.operator(work.operator);
    let fail = |problem: KernelError| Failure::Operator { operator: work.operator, problem };
    let emit = emit::find(&operator.kind)
        .ok_or_else(|| fail(unsupported!("the CUDA device has no `{}`", operator.kind)))?;
    let mut actions = Actions::new(status, i64::from(work.operator.0) + 1);
    actions.ampere = ampere;
    let call = Call {
        operator,
        args: &seen.args,
        outputs: &seen.outputs,
        hidden: &seen.hidden,
        iteration: 0,
        position: u64::from(work.operator.0),
        steps_done: 0,
        random_key: work.random_key,
        replay: work.replay,
        optimizer: graph.group(operator),
        batch,
    };
    emit::takes(&call).map_err(fail)?;
    if let Some((kept, input)) = kept_input(&call) {
        actions.copy(kept, input).map_err(fail)?;
    }
    emit(&call, &mut actions).map_err(fail)?;
    Ok(actions.list)
}

/// Moves updates that follow each other, and that nothing comes between, to the first of them. The
/// later ones wait for nothing and begin nothing, so all they need is there when the first runs.
fn fuse(script: &Script, lists: &mut [Vec<Action>]) -> Vec<Vec<(usize, u64)>> {
    let elements = |list: &[Action]| match list {
        [Action::Launch(l)]
            if l.family == Family::Optimizer && l.params.len() == size_of::<Update>() =>
        {
            let at = std::mem::offset_of!(Update, of) + std::mem::offset_of!(One, count);
            let rule = format!("{} {:?}", l.kernel, l.vary);
            Some((rule, u64::from_ne_bytes(l.params.get(at..at + 8)?.try_into().ok()?)))
        }
        _ => None,
    };
    let mut groups: Vec<(String, Vec<(usize, u64)>)> = Vec::new();
    let (mut open, mut stretch) = (false, None);
    for &item in &script.streams[Stream::Compute.index()] {
        let of = &script.items[item];
        let Work::Step(work) = &of.work else { continue };
        match elements(&lists[item]) {
            None => open = false,
            Some((kernel, count)) => {
                // The first one may not touch the window before the job holds it.
                let together = std::mem::replace(&mut stretch, of.stretch) == of.stretch;
                let alone = of.waits.is_empty() && work.begins.is_empty() && work.capture.is_none();
                let follows = together && alone;
                match groups.last_mut().filter(|g| open && follows && g.0 == kernel) {
                    Some(group) => group.1.push((item, count)),
                    None => groups.push((kernel, vec![(item, count)])),
                }
                open = true;
            }
        }
    }
    let mut fused = Vec::new();
    for (_, group) in groups.into_iter().filter(|g| g.1.len() > 1) {
        let launches: Vec<&Launch> = group
            .iter()
            .flat_map(|(item, _)| &lists[*item])
            .filter_map(|a| if let Action::Launch(l) = a { Some(l) } else { None })
            .collect();
        let Some(joined) = emit::optimizer::fuse(&launches) else { continue };
        group.iter().for_each(|(item, _)| lists[*item].clear());
        lists[group[0].0] = joined.into_iter().map(Action::Launch).collect();
        fused.push(group);
    }
    fused
}

#[cfg(test)]
mod tests {
    use super::super::launch::Vary;
    use super::*;
    use crate::backend::Item;

    #[test]
    fn updates_of_different_stretches_are_launched_apart() {
        let item = |(at, stretch): (u32, Option<usize>)| Item {
            stream: Stream::Compute,
            waits: Vec::new(),
            fetches: Vec::new(),
            trigger: None,
            work: Work::Step(StepWork {
                operator: OpId(at),
                addresses: Vec::new(),
                replay: false,
                random_key: 0,
                begins: Vec::new(),
                workspace: None,
                capture: None,
            }),
            top: Bytes::ZERO,
            stretch,
        };
        let fused = |stretches: [Option<usize>; 4]| {
            let script = Script {
                items: (0..).zip(stretches).map(item).collect(),
                streams: [(0..4).collect(), Vec::new(), Vec::new()],
                order: (0..4).collect(),
                arena: Bytes::ZERO,
                store: Bytes::ZERO,
                stretches: vec![vec![2], vec![3]],
            };
            let update = Launch {
                family: Family::Optimizer,
                kernel: "update_adam".to_owned(),
                grid: 1,
                block: [256, 1],
                params: vec![0; size_of::<Update>()],
                vary: Vary::Nothing,
                beside: None,
                shared: 0,
            };
            let mut lists = vec![vec![Action::Launch(update)]; 4];
            let groups = fuse(&script, &mut lists);
            groups
                .iter()
                .map(|group| group.iter().map(|of| of.0).collect())
                .collect::<Vec<Vec<_>>>()
        };
        assert_eq!(fused([None; 4]), [[0, 1, 2, 3]]);
        assert_eq!(fused([None, Some(0), Some(0), Some(1)]), [[1, 2]]);
    }
}
