use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime};

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use leasehold::Holder;
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::exit::{Exit, Failure};

pub(crate) const BOLD: Style = Style::new().bold();
pub(crate) const GOOD: Style = AnsiColor::Green.on_default().bold();
pub(crate) const WARN: Style = AnsiColor::Yellow.on_default().bold();
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();

/// Tells of a failure, in one line. Nothing can be done if nobody listens.
pub(crate) fn error(failure: &Failure) {
    note(BAD, failure);
}

/// Tells of something worth knowing, in one line.
pub(crate) fn warning(text: impl fmt::Display) {
    note(WARN, text);
}

fn note(style: Style, text: impl fmt::Display) {
    writeln!(anstream::stderr(), "{style}leasehold:{style:#} {text}").ok();
}

/// The end of a command that only printed something. A reader that has seen enough, as `head` has, is
/// no failure.
pub(crate) fn written(result: io::Result<()>) -> Result<Exit, Failure> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::new(
            Exit::Failed,
            format!("cannot write the output: {error}"),
        )),
        _ => Ok(Exit::Done),
    }
}

/// Shows the events of Leasehold's own crates on standard error, from debug (1) or trace (2) on.
pub(crate) fn trace(verbose: u8) {
    let level = match verbose {
        0 => return,
        1 => Level::DEBUG,
        _ => Level::TRACE,
    };
    let lines = LINES.get_or_init(Lines::start);
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(AutoStream::choice(&io::stderr()) != anstream::ColorChoice::Never)
        .with_writer(move || lines.clone());
    tracing_subscriber::registry()
        .with(Targets::new().with_target("leasehold", level))
        .with(layer)
        .init();
}

/// Waits for what [`trace`] still has to show, but not for a reader that has stopped reading.
pub(crate) fn flush() {
    if let Some(lines) = LINES.get() {
        let (sender, shown) = channel();
        if lines.0.try_send(Line::Flush(sender)).is_ok() {
            shown.recv_timeout(Duration::from_secs(1)).ok();
        }
    }
}

static LINES: OnceLock<Lines> = OnceLock::new();

/// Writes to standard error from a thread of its own, and drops what does not fit: a reader that has
/// stopped reading must not keep the lock from being renewed.
#[derive(Debug, Clone)]
struct Lines(SyncSender<Line>);

#[derive(Debug)]
enum Line {
    Text(Vec<u8>),
    Flush(Sender<()>),
}

impl Lines {
    fn start() -> Self {
        let (sender, lines) = sync_channel(1024);
        thread::spawn(move || {
            for line in lines {
                match line {
                    Line::Text(text) => io::stderr().write_all(&text).ok(),
                    Line::Flush(shown) => shown.send(()).ok(),
                };
            }
        });
        Self(sender)
    }
}

impl Write for Lines {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.try_send(Line::Text(text.to_vec())).ok();
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line on the terminal that says what we wait for; gone when this is dropped.
#[derive(Debug)]
pub(crate) struct WaitingLine;

impl WaitingLine {
    /// `None` where nobody would see it.
    pub(crate) fn start() -> Option<Self> {
        let colours = AutoStream::choice(&io::stderr()) != anstream::ColorChoice::Never;
        (io::stderr().is_terminal() && colours).then(|| Self)
    }

    pub(crate) fn show(&self, text: impl fmt::Display) {
        let mut stderr = io::stderr();
        // Cut at the right edge instead of wrapped: a wrapped line could not be taken back.
        write!(stderr, "\r\x1b[?7l\x1b[2K{text}\x1b[?7h").ok();
        stderr.flush().ok();
    }
}

impl Drop for WaitingLine {
    fn drop(&mut self) {
        let mut stderr = io::stderr();
        write!(stderr, "\r\x1b[2K").ok();
        stderr.flush().ok();
    }
}

/// Who holds a lock, in a few words.
pub(crate) fn who(holder: &Holder) -> String {
    let mut text = match &holder.owner {
        Some(owner) => printable(owner),
        None => "somebody".to_owned(),
    };
    if let Some(label) = &holder.label {
        text.push_str(&format!(" ({})", printable(label)));
    }
    if let Some(age) = holder.since.and_then(age) {
        text.push_str(&format!(", for {}", short(age)));
    }
    text
}

/// `text` as it may be shown on a terminal: whoever wrote it into the store must not steer ours.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// A time span to read: whole seconds, or milliseconds below ten seconds.
pub(crate) fn short(span: Duration) -> String {
    let rounded = if span < Duration::from_secs(10) {
        Duration::from_millis(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
    } else {
        Duration::from_secs(span.as_secs())
    };
    humantime::format_duration(rounded).to_string()
}

/// How long ago `since` was, by this machine's clock; `None` if that lies ahead.
pub(crate) fn age(since: SystemTime) -> Option<Duration> {
    #[allow(
        clippy::disallowed_methods,
        reason = "shown to people, decides nothing"
    )]
    let now = SystemTime::now();
    now.duration_since(since).ok()
}
