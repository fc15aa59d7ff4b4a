//! Starts the command under the device and waits for it.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::{env, io};

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::units::Bytes;

use super::unpack::Unpacked;
use super::{DataDependent, Flags};

/// Loggers that would go online, and the variable that keeps each at home.
const OFFLINE: [(&str, &str); 5] = [
    ("WANDB_MODE", "offline"),
    ("COMET_MODE", "disabled"),
    ("NEPTUNE_MODE", "offline"),
    ("CLEARML_OFFLINE_MODE", "1"),
    ("SWANLAB_MODE", "disabled"),
];

/// What decides which kernels run on a device, and what they ask for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kernels {
    /// The compute capability, major × 10 + minor.
    pub capability: u32,
    pub multiprocessors: u32,
}

impl Kernels {
    /// A profile has the major number of the capability; the minor one follows from how many
    /// threads a multiprocessor of that generation holds.
    pub fn new(profile: &Profile) -> Self {
        let Some(m) = &profile.multiprocessors else {
            return Self { capability: 90, multiprocessors: 132 };
        };
        let minor = match (m.capability, m.threads) {
            (8, 1536) if profile.name.contains("40") || profile.name.contains("l4") => 9,
            (8, 1536) => 6,
            (7, 1024) => 5,
            _ => 0,
        };
        Self { capability: m.capability * 10 + minor, multiprocessors: m.count }
    }
}

/// A device's memory: what it says it has, and what allocations may take.
#[derive(Clone, Copy)]
pub struct Memory {
    pub total: Bytes,
    pub capacity: Bytes,
}

impl Memory {
    /// What the flags ask for.
    ///
    /// # Errors
    /// When `--device-bytes` is too small for any script, or exceeds a process's address space.
    pub fn asked(flags: &Flags, profile: &Profile) -> anyhow::Result<Self> {
        let Some(bytes) = flags.device_bytes else {
            return Ok(Self::new(profile));
        };
        if bytes < Self::LEAST {
            bail!(
                "--device-bytes {}: PyTorch takes at least {} at a time, so no script fits",
                bytes.0,
                Self::LEAST
            );
        }
        if bytes > Self::UNLIMITED.total {
            bail!("--device-bytes {}: at most {} can be asked for", bytes.0, Self::UNLIMITED.total);
        }
        Ok(Self { total: bytes, capacity: bytes })
    }

    /// A device's own.
    pub fn new(profile: &Profile) -> Self {
        Self { total: profile.memory_bytes, capacity: profile.available() }
    }

    /// The smallest request of PyTorch's allocator to a device: 2 MiB.
    const LEAST: Bytes = Bytes(2 << 20);

    /// More than any job takes: 4 TiB, since PyTorch reserves addresses for all of it.
    pub const UNLIMITED: Self = Self { total: Bytes(4 << 40), capacity: Bytes(4 << 40) };
}

/// The command with its environment.
///
/// # Errors
/// When this executable can't be found.
pub fn command(
    flags: &Flags,
    profile: &Profile,
    memory: Memory,
    unpacked: &Unpacked,
    scratch: &Path,
) -> anyhow::Result<Command> {
    let (program, arguments) = flags.command.split_first().context("a command is needed")?;
    let mut command = Command::new(program);
    command.args(arguments);
    let mut set = |name: &str, value: &dyn std::fmt::Display| {
        command.env(name, value.to_string());
    };
    set("NEAP_DRY_TOTAL_BYTES", &memory.total.0);
    set("NEAP_DRY_CAPACITY_BYTES", &memory.capacity.0);
    set("NEAP_DRY_DEVICES", &flags.devices);
    let kernels = Kernels::new(profile);
    set("NEAP_DRY_CAPABILITY", &kernels.capability);
    set("NEAP_DRY_MULTIPROCESSORS", &kernels.multiprocessors);
    set("NEAP_DRY_NAME", &format!("{} (neap dry)", profile.name));
    set("NEAP_DRY_CUDNN_WORKSPACE", &flags.cudnn_workspace.unwrap_or_default().0);
    set("NEAP_DRY_LATE", &u8::from(flags.late));
    let detail = [flags.plot.is_some(), flags.html.is_some(), flags.check_against.is_some()];
    let detail = detail.contains(&true);
    set("NEAP_DRY_DETAIL", &u8::from(detail));
    set("NEAP_DRY_ALLOW_WRITES", &u8::from(flags.allow_writes));
    set(
        "NEAP_DRY_DATA_DEPENDENT",
        match flags.data_dependent {
            DataDependent::Max => &"max",
            DataDependent::Zero => &"zero",
        },
    );
    if let Some(ranks) = flags.ranks {
        set("NEAP_DRY_RANKS", &ranks);
    }
    if let Some(steps) = flags.steps {
        set("NEAP_DRY_STEPS", &steps);
    }
    if !flags.allow_writes {
        stay_offline(&mut command);
    }
    for (name, path) in [("NEAP_DRY_RECORD", &flags.record), ("NEAP_DRY_SNAPSHOT", &flags.snapshot)]
    {
        if let Some(path) = path {
            command.env(name, std::path::absolute(path)?);
        }
    }
    command.env("NEAP_DRY_DIR", scratch).env("NEAP_CACHE", &unpacked.cache);
    command.env("NEAP_DRY_EXE", env::current_exe().context("this executable cannot be found")?);
    command.env_remove("NEAP_DRY_TORCH");
    hide_real_gpus(&mut command);
    let mut paths = vec![unpacked.hook.clone(), unpacked.python.clone()];
    let own = env::var_os("PYTHONPATH").unwrap_or_default();
    paths.extend(env::split_paths(&own).filter(|p| !p.as_os_str().is_empty()));
    command.env("PYTHONPATH", env::join_paths(paths)?);
    Ok(command)
}

/// Keeps loggers from going online.
pub fn stay_offline(command: &mut Command) {
    for (name, value) in OFFLINE {
        command.env(name, value);
    }
}

/// Hides the machine's own GPUs from processes that the start-up hook does not reach, such as
/// `python -I`. The hook shows its process what was visible before.
fn hide_real_gpus(command: &mut Command) {
    let visible = "CUDA_VISIBLE_DEVICES";
    let own = env::var_os(visible);
    if env::var_os("NEAP_DRY_HIDDEN").is_some() && own.as_ref().is_some_and(|v| v.is_empty()) {
        return; // A dry run within another: they are hidden, and what was visible is noted.
    }
    match own {
        Some(own) => command.env("NEAP_DRY_USER_VISIBLE", own),
        None => command.env_remove("NEAP_DRY_USER_VISIBLE"),
    };
    command.env("NEAP_DRY_HIDDEN", "1").env(visible, "");
}

/// The most commands that run side by side.
pub const AT_ONCE: usize = 2;

/// The children that signals go on to; 0 for none.
static CHILDREN: [AtomicI32; AT_ONCE] = [const { AtomicI32::new(0) }; AT_ONCE];
/// The last signal that asked this process to end; 0 for none.
static ASKED: AtomicI32 = AtomicI32::new(0);

/// Whether a signal asked this process to end.
pub fn interrupted() -> bool {
    ASKED.load(Ordering::SeqCst) != 0
}

/// Passes a signal on to the children, unless a terminal sent it: then the child has it already.
extern "C" fn forward(signal: libc::c_int, about: *const libc::siginfo_t, _: *mut libc::c_void) {
    /// The kernel sent it, not a process.
    const KERNEL: libc::c_int = 0x80;
    ASKED.store(signal, Ordering::SeqCst);
    // SAFETY: the kernel gives a valid structure, since the handler asks for one.
    let by_terminal = unsafe { (*about).si_code } == KERNEL;
    for child in &CHILDREN {
        let child = child.load(Ordering::SeqCst);
        if child > 0 && !by_terminal {
            // SAFETY: kill is safe in a signal handler, and the child has not been waited for.
            unsafe { libc::kill(child, signal) };
        }
    }
}

/// From now on signals that ask this process to end go on to the command, and do not end this
/// process, which still has to clean up and to report.
pub fn forward_signals() {
    let handler: extern "C" fn(libc::c_int, *const libc::siginfo_t, *mut libc::c_void) = forward;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: a zeroed action is a valid one, and the handler does nothing but what a signal
        // handler may.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Starts the command and waits for it, with signals passed on. Where one has come before, the
/// command is not started, and ends as by that signal.
///
/// # Errors
/// When the command can't be started.
pub fn run(mut command: Command) -> anyhow::Result<ExitStatus> {
    let program = PathBuf::from(command.get_program());
    forward_signals();
    if interrupted() {
        return Ok(ExitStatus::from_raw(ASKED.load(Ordering::SeqCst)));
    }
    let mut child: Child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!(
                "{}: no such command; after `--` comes what you would type without neap",
                program.display()
            )
        }
        Err(error) => {
            return Err(error).with_context(|| format!("{} cannot be started", program.display()));
        }
    };
    let id = child.id() as i32;
    let free = |slot: &&AtomicI32| {
        slot.compare_exchange(0, id, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    };
    let slot = CHILDREN.iter().find(free);
    if interrupted() {
        // It came before the child was known.
        // SAFETY: kill takes any number, and the child has not been waited for.
        unsafe { libc::kill(id, ASKED.load(Ordering::SeqCst)) };
    }
    let status = child.wait();
    if let Some(slot) = slot {
        slot.store(0, Ordering::SeqCst);
    }
    status.context("the command cannot be waited for")
}

/// `name=value` lines for the start-up hook.
pub fn environment(prepared: &super::prepare::Prepared) -> String {
    let preload: Vec<OsString> =
        prepared.preload.iter().map(|p| p.clone().into_os_string()).collect();
    let preload = preload.join(std::ffi::OsStr::new(":"));
    format!(
        "LD_PRELOAD={}\nLD_LIBRARY_PATH={}\nNEAP_DRY_CUDA={}",
        preload.to_string_lossy(),
        prepared.libraries.display(),
        prepared.cuda
    )
}
