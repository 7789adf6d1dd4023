#![allow(clippy::doc_markdown, reason = "shown to users as it stands")]

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;

use crate::exit::Exit;

/// Run a job under a lock, see who holds it, take it away.
///
/// Without further ado locks are kept in a folder of the user's, for the programs of one machine.
/// With the URL of a store they hold between machines.
#[derive(Debug, Parser)]
#[command(
    name = "leasehold",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    subcommand_required = true,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_long_help = after_help(),
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Tell on standard error what happens to the lock; twice: in detail
    #[arg(short, long, global = true, display_order = 101, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Where the locks are, as in redis://host or file:/folder; options go into its query string
    ///
    /// Default: a folder of the user's ($XDG_STATE_HOME/leasehold, or ~/.local/state/leasehold), for
    /// locks among the programs of one user on one machine. Everybody on the machine can read the
    /// arguments of a program: put a URL that contains a password into LEASEHOLD_URL.
    #[arg(
        long,
        global = true,
        display_order = 100,
        env = "LEASEHOLD_URL",
        hide_env_values = true,
        value_name = "URL",
        value_hint = ValueHint::Url
    )]
    pub(crate) url: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock
    ///
    /// The lock is renewed while the command runs and freed when it ends; the exit code of the
    /// command comes back. The command finds LEASEHOLD_KEY, LEASEHOLD_TOKEN (the fencing token) and
    /// LEASEHOLD_OWNER in its environment.
    ///
    /// TERM, INT, HUP, QUIT, USR1 and USR2 are passed on to the command's whole process group. When
    /// the lock is lost, or cannot be renewed and its end comes near, that group gets TERM, then
    /// KILL, before the store may give the lock to another; the exit code is then 116.
    #[command(after_long_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Show who holds a lock
    ///
    /// Ends with 0 if the lock is held and with 1 if it is free.
    #[command(after_long_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// List the locks that are held or waited for
    ///
    /// With PREFIX only those whose keys begin so. What the store does not know is shown as `-`. The list
    /// is no snapshot: locks that change hands meanwhile may be missing.
    #[command(after_long_help = LS_EXAMPLES)]
    Ls(LsArgs),
    /// Take a lock away from its holder
    ///
    /// Shows who holds it and asks. Takes away the grant that was shown and no other: if the lock has
    /// changed hands meanwhile, nothing happens. Ends with 0 if it was taken away, else with 1.
    #[command(after_long_help = BREAK_EXAMPLES)]
    Break(BreakArgs),
    /// Show which stores do what is needed, and why
    ///
    /// Judges the stores at the given URLs (else the one of --url or LEASEHOLD_URL, else every kind
    /// that there is) by what they promise. Ends with 0 if one of them does all that is asked for,
    /// with 1 if none does.
    #[command(after_long_help = CHOOSE_EXAMPLES)]
    Choose(ChooseArgs),
    /// Examine the store: versions, promises, round trip, clock, and what endangers its locks
    ///
    /// Ends with 0 if there is nothing to warn of, with 1 after warnings, with 120 if one lock may be
    /// given to two in daily use; and with 118 or 119 if the store is not reached or refuses.
    #[command(after_long_help = DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// Run the rules of the contract on the store, in a place of its own there
    ///
    /// Nobody else's locks are touched: everything lies under a prefix, or in a folder, with a random name,
    /// and is removed at the end, after Ctrl-C too. The servers are left alone: what would stop or restart
    /// them is listed as ignored, with the reason. It takes a minute or several, and puts load on the
    /// servers.
    ///
    /// Ends with 0 if no rule was broken, else with 1.
    #[cfg(feature = "conformance")]
    #[command(after_long_help = CONFORMANCE_EXAMPLES)]
    Conformance(ConformanceArgs),
    /// Print completions for a shell
    #[command(after_long_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
    /// Print the manual page, or write all of them into a folder
    Man(ManArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// What is to be locked: any text of at most 1024 bytes
    pub(crate) key: String,

    /// How long the store keeps the lock when it is not renewed [default: 30s, or what the URL says]
    ///
    /// It is renewed every third of that time, for as long as the command runs.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Option<Duration>,

    /// How long to wait for the lock at most [default: no limit, or what the URL says]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) wait: Option<Duration>,

    /// Do not wait for the lock
    #[arg(short, long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// What `leasehold status` tells about this holder
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,

    /// What to do if the lock was not got: end with 115, or with 0 as if all was done
    #[arg(long, value_enum, default_value_t = OnBusy::Fail, value_name = "WHAT")]
    pub(crate) on_busy: OnBusy,

    /// How long the command may take to end after TERM when the lock cannot be renewed [default: a
    /// sixth of the ttl, at most 10s]
    ///
    /// At most a third of the ttl, for it is taken from the time in which a renewal may still succeed.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) grace: Option<Duration>,

    /// The command and its arguments
    #[arg(last = true, required = true, value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// What to do if the lock was not got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnBusy {
    Fail,
    Skip,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// The key of the lock
    pub(crate) key: String,

    /// Print one line of JSON; what the store does not know is null
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// What the keys begin with
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,

    /// List anew every 2s, or as often as TIME says, until Ctrl-C
    #[arg(
        short,
        long,
        value_name = "TIME",
        value_parser = humantime::parse_duration,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2s"
    )]
    pub(crate) watch: Option<Duration>,

    /// Print one line of JSON, with --watch one each time; what the store does not know is null
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BreakArgs {
    /// The key of the lock
    pub(crate) key: String,

    /// Do not ask
    #[arg(short, long)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ChooseArgs {
    /// The stores to choose from, as in redis://host; a URL with a password belongs into LEASEHOLD_URL
    #[arg(value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) urls: Vec<String>,

    /// Judge every kind of store, although a URL is set
    #[arg(long, conflicts_with = "urls")]
    pub(crate) all: bool,

    /// A server may be lost: what is held stays held, and locks are granted on
    #[arg(long)]
    pub(crate) node_loss: bool,

    /// A consensus protocol decides, not clocks
    #[arg(long)]
    pub(crate) consensus: bool,

    /// Tokens rise although a server crashed
    #[arg(long)]
    pub(crate) durable_tokens: bool,

    /// First come, first served
    #[arg(long)]
    pub(crate) order: bool,

    /// A holder that hangs is thrown out, though its process lives on
    #[arg(long)]
    pub(crate) expiry: bool,

    /// Waiters are told, and need not ask again and again
    #[arg(long)]
    pub(crate) push: bool,

    /// The lock of a dead holder is free after a ttl as short as this
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Option<Duration>,

    /// Print one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one line of JSON; what is not known is null
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(feature = "conformance")]
#[derive(Debug, Args)]
pub(crate) struct ConformanceArgs {
    /// The ids of the rules to run, as in C1 or F5 [default: all]
    #[arg(value_name = "RULE")]
    pub(crate) rules: Vec<String>,

    /// Rules to leave out, with commas between them
    #[arg(long, value_name = "RULES", value_delimiter = ',')]
    pub(crate) skip: Vec<String>,

    /// The ttl of locks that are to run out [default: 1s, on etcd 3s, on ZooKeeper 4s]
    ///
    /// Longer for a slow network or a busy machine.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Option<Duration>,

    /// How many checks run at a time [default: 8]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,

    /// Show the rules, and run none
    #[arg(long)]
    pub(crate) list: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Write leasehold.1 and a page for each subcommand into this folder
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,
}

fn after_help() -> String {
    let mut help = String::from(EXAMPLES);
    help.push_str("\n\nExit codes:\n");
    for (code, meaning) in Exit::TABLE {
        help.push_str(&format!("  {code:<6} {}\n", meaning.replace('`', "")));
    }
    help
}

const EXAMPLES: &str = "\
Examples:
  leasehold run nightly-backup -- ./backup.sh
  leasehold run --wait 10s deploy -- make deploy
  leasehold run -n --on-busy skip reports -- ./reports.sh   # for cron
  leasehold status nightly-backup
  leasehold ls
  leasehold break nightly-backup

  export LEASEHOLD_URL=redis://redis.internal               # between machines
  leasehold run --ttl 1m import -- ./import.sh";

const RUN_EXAMPLES: &str = "\
Examples:
  leasehold run nightly-backup -- ./backup.sh
  leasehold run deploy --wait 10s --label \"$USER\" -- make deploy
  leasehold run -n --on-busy skip reports -- ./reports.sh
  leasehold run stock -- sh -c 'update-stock --fencing-token \"$LEASEHOLD_TOKEN\"'";

const STATUS_EXAMPLES: &str = "\
Examples:
  leasehold status nightly-backup
  leasehold status --json nightly-backup | jq -r .owner";

const LS_EXAMPLES: &str = "\
Examples:
  leasehold ls
  leasehold ls order: --watch
  leasehold ls --json | jq -r '.[] | select(.waiting > 0) | .key'";

const BREAK_EXAMPLES: &str = "\
Examples:
  leasehold break nightly-backup
  leasehold break --yes nightly-backup";

const CHOOSE_EXAMPLES: &str = "\
Examples:
  leasehold choose
  leasehold choose --node-loss --order
  leasehold choose --durable-tokens --ttl 2s redis://redis.internal etcd://etcd-1,etcd-2,etcd-3";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  leasehold doctor --url redis://redis.internal
  leasehold doctor --json | jq '.findings[].what'";

#[cfg(feature = "conformance")]
const CONFORMANCE_EXAMPLES: &str = "\
Examples:
  leasehold conformance --url redis://redis.internal
  leasehold conformance --list
  leasehold conformance C1 C8 F5 --ttl 5s";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  leasehold completions bash > ~/.local/share/bash-completion/completions/leasehold
  leasehold completions zsh > ~/.zfunc/_leasehold
  leasehold completions fish > ~/.config/fish/completions/leasehold.fish";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn arguments_are_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_stand_before_or_after_the_key() {
        for line in [
            "leasehold run --wait 10s -v k --ttl 5s -- echo --ttl",
            "leasehold --verbose run k --wait 10s --ttl 5s -- echo --ttl",
        ] {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            let Command::Run(run) = cli.command else {
                panic!("not run: {line}");
            };
            assert_eq!(run.key, "k");
            assert_eq!(run.ttl, Some(Duration::from_secs(5)));
            assert_eq!(run.wait, Some(Duration::from_secs(10)));
            assert_eq!(run.command, ["echo", "--ttl"]);
            assert_eq!(cli.verbose, 1);
        }
    }
}
