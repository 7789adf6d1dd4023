use std::io::{self, Write};

use clap::CommandFactory;
use clap_mangen::Man;

use crate::cli::{Cli, ManArgs};
use crate::exit::{Exit, Failure};
use crate::output;

/// Prints the manual page, or writes it and one for each subcommand into a folder.
pub(crate) fn man(args: &ManArgs) -> Result<Exit, Failure> {
    let command = Cli::command();
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        return output::written(
            Man::new(command)
                .render(&mut page)
                .and_then(|()| io::stdout().write_all(&page)),
        );
    };
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(command, dir))
        .map_err(|error| {
            Failure::new(
                Exit::Failed,
                format!("cannot write into {}: {error}", dir.display()),
            )
        })?;
    Ok(Exit::Done)
}
