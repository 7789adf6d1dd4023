use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::mem;
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use leasehold_conformance::fixtures::{self, Missing};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pty_process::blocking::Pty;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// How long anything may take that should happen at once, on a busy machine too.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A user's home, empty at first, with nothing else in the environment that matters here.
pub(crate) struct Home {
    folder: TempDir,
    url: Option<String>,
}

impl Home {
    /// With locks in the default place.
    pub(crate) fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            url: None,
        }
    }

    /// With locks in `server`.
    pub(crate) fn with(server: &RedisServer) -> Self {
        Self::at(&server.url())
    }

    /// With locks in the store at `url`.
    pub(crate) fn at(url: &str) -> Self {
        Self {
            url: Some(url.to_owned()),
            ..Self::new()
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command, with its arguments separated by spaces.
    pub(crate) fn leasehold(&self, args: &str) -> Command {
        let mut command = self.program(env!("CARGO_BIN_EXE_leasehold"));
        command.args(args.split_whitespace()).stdin(Stdio::null());
        command
    }

    /// Another program of this user's, which finds the command in `LEASEHOLD`.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        self.env(|name, value| {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        });
        command
    }

    /// The command with `script` as what it runs.
    pub(crate) fn script(&self, args: &str, script: &str) -> Command {
        let mut command = self.leasehold(args);
        command.args(["--", "sh", "-c", script]);
        command
    }

    fn env(&self, mut set: impl FnMut(&'static str, Option<&OsStr>)) {
        for name in HIDDEN {
            set(name, None);
        }
        set("HOME", Some(self.folder.path().as_os_str()));
        set("LEASEHOLD", Some(env!("CARGO_BIN_EXE_leasehold").as_ref()));
        if let Some(url) = &self.url {
            set("LEASEHOLD_URL", Some(url.as_ref()));
        }
    }

    /// Whether the lock is held, as `status` has it.
    pub(crate) fn is_held(&self, key: &str) -> bool {
        match self
            .leasehold("status")
            .arg(key)
            .output()
            .unwrap()
            .status
            .code()
        {
            Some(0) => true,
            Some(1) => false,
            other => panic!("status ended with {other:?}"),
        }
    }
}

const HIDDEN: [&str; 6] = [
    "LEASEHOLD_URL",
    "XDG_STATE_HOME",
    "NO_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLUMNS",
];

/// A process that is killed if the test fails.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.0.id()).unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Its end, which must come.
    pub(crate) fn end(&mut self) -> ExitStatus {
        eventually("the command ends", || self.0.try_wait().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Processes that others started for the test: none of them outlives one that fails.
pub(crate) struct Strays<const N: usize>(pub(crate) [Pid; N]);

impl<const N: usize> Drop for Strays<N> {
    fn drop(&mut self) {
        for process in self.0 {
            if !is_gone(process) {
                kill(process, Signal::SIGKILL).ok();
            }
        }
    }
}

/// A Redis server of the test's own.
pub(crate) struct RedisServer {
    server: fixtures::redis::RedisServer,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// With these arguments beside the usual ones.
    pub(crate) fn start_with(arguments: &[&str]) -> Self {
        let server = Runtime::new()
            .unwrap()
            .block_on(fixtures::redis::RedisServer::start(
                arguments.iter().copied(),
            ));
        Self {
            server: server.unwrap(),
        }
    }

    /// Why there can be none, unless the environment wants it to be a failure.
    pub(crate) fn missing() -> Option<Missing> {
        let name = fixtures::redis::RedisServer::PROGRAM;
        let missing = Missing::new("redis", format!("there is no program {name}"));
        (fixtures::program(name).is_none() && !missing.is_required()).then_some(missing)
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    /// Lets it fall silent; comes back when it has.
    pub(crate) fn pause(&self) {
        self.server.process().pause().unwrap();
    }

    pub(crate) fn resume(&self) {
        self.server.process().resume().unwrap();
    }

    /// One command, its words separated by spaces; the answer as Redis writes it.
    pub(crate) fn ask(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.server.port())).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(stream, "{command}\r\nQUIT\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// One command whose answer is a number.
    pub(crate) fn number(&self, command: &str) -> i64 {
        let answer = self.ask(command);
        let number = answer.lines().next().and_then(|it| it.strip_prefix(':'));
        number.expect(&answer).parse().unwrap()
    }
}

/// A program at a terminal of its own.
pub(crate) struct Screen {
    pub(crate) running: Running,
    pty: Arc<Pty>,
    shown: Arc<(Mutex<Shown>, Condvar)>,
    seen: usize,
}

#[derive(Default)]
struct Shown {
    text: String,
    over: bool,
}

impl Screen {
    /// An interactive shell whose prompt is `$ `; what is typed is not shown.
    pub(crate) fn shell(home: &Home) -> Self {
        let mut screen = Self::start(
            home,
            "bash",
            &["--norc", "--noprofile", "--noediting", "-i"],
        );
        screen.enter("stty -echo; PS1='$ '; PS2=; set +o history; echo rea''dy");
        screen.expect("ready");
        screen.expect("$ ");
        screen
    }

    pub(crate) fn start(home: &Home, program: &str, args: &[&str]) -> Self {
        let (pty, pts) = pty_process::blocking::open().unwrap();
        pty.resize(pty_process::Size::new(24, 80)).unwrap();
        let mut command = pty_process::blocking::Command::new(program).args(args);
        home.env(|name, value| {
            let before = mem::replace(&mut command, pty_process::blocking::Command::new(program));
            command = match value {
                Some(value) => before.env(name, value),
                None => before.env_remove(name),
            };
        });
        command = command.env("TERM", "xterm");
        let running = Running(command.spawn(pts).unwrap());
        let pty = Arc::new(pty);
        let shown = Arc::new((Mutex::new(Shown::default()), Condvar::new()));
        std::thread::spawn({
            let (pty, shown) = (pty.clone(), shown.clone());
            move || {
                let mut buffer = [0; 4096];
                loop {
                    // A terminal whose last program has left reports an error.
                    let read = (&*pty).read(&mut buffer).unwrap_or(0);
                    let Ok(mut now) = shown.0.lock() else {
                        break;
                    };
                    now.text.push_str(&String::from_utf8_lossy(&buffer[..read]));
                    now.over = read == 0;
                    shown.1.notify_all();
                    if now.over {
                        break;
                    }
                }
            }
        });
        Self {
            running,
            pty,
            shown,
            seen: 0,
        }
    }

    /// Types `text`.
    pub(crate) fn type_in(&self, text: &str) {
        (&*self.pty).write_all(text.as_bytes()).unwrap();
    }

    /// Types a line.
    pub(crate) fn enter(&self, line: &str) {
        self.type_in(&format!("{line}\r"));
    }

    /// Waits until `text` is shown, after all that was expected before; gives back what came up to
    /// its end.
    pub(crate) fn expect(&mut self, text: &str) -> String {
        let (shown, changed) = &*self.shown;
        let (now, _) = changed
            .wait_timeout_while(shown.lock().unwrap(), LIMIT, |now| {
                !now.over && !now.text[self.seen..].contains(text)
            })
            .unwrap();
        let new = &now.text[self.seen..];
        let Some(at) = new.find(text) else {
            panic!("{text:?} is not shown, but {new:?}");
        };
        let end = at + text.len();
        let before = new[..end].to_owned();
        self.seen += end;
        before
    }
}

/// Waits until `look` finds something.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        pause();
    }
}

/// Waits until the file has a whole line, and gives it back.
#[track_caller]
pub(crate) fn line_in(path: &Path) -> String {
    eventually(&format!("a line in {}", path.display()), || {
        let text = fs::read_to_string(path).ok()?;
        text.split_once('\n').map(|(line, _)| line.to_owned())
    })
}

/// Waits until the file has a whole line with a process id.
#[track_caller]
pub(crate) fn pid_in(path: &Path) -> Pid {
    Pid::from_raw(line_in(path).trim().parse().unwrap())
}

/// Whether the process runs no more; one that its parent has not yet noticed counts as gone.
pub(crate) fn is_gone(process: Pid) -> bool {
    match stat(process) {
        Some((state, _)) => ['Z', 'X'].contains(&state),
        None => kill(process, None) == Err(Errno::ESRCH),
    }
}

/// Whether the process is stopped.
pub(crate) fn is_stopped(process: Pid) -> bool {
    stat(process).is_some_and(|(state, _)| state == 'T')
}

/// The processes that this one has started.
pub(crate) fn children(process: Pid) -> Vec<Pid> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let all = all.filter_map(|it| it.file_name().to_str()?.parse().ok());
    let all = all.map(Pid::from_raw);
    all.filter(|&it| stat(it).is_some_and(|(_, parent)| parent == process))
        .collect()
}

/// The state of a process and its parent.
fn stat(process: Pid) -> Option<(char, Pid)> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut rest = rest.split(' ');
    let state = rest.next()?.chars().next()?;
    Some((state, Pid::from_raw(rest.next()?.parse().ok()?)))
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The code that a shell would show.
pub(crate) fn shell_code(status: ExitStatus) -> i32 {
    status
        .code()
        .or(status.signal().map(|signal| 128 + signal))
        .unwrap()
}

/// Between two looks at something that only polling can see.
pub(crate) fn pause() {
    #[allow(
        clippy::disallowed_methods,
        reason = "with a limit, in a loop that looks for the event"
    )]
    std::thread::sleep(Duration::from_millis(10));
}
