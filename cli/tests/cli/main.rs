//! The command as its users meet it: real processes, real stores, a real terminal.
//!
//! Those that need a server are listed as ignored where there is none, with the reason.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

#[cfg(feature = "conformance")]
mod conformance;
mod docs;
mod judging;
mod listing;
mod lost;
mod operators;
mod run;
mod signals;
mod support;
mod terminal;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use crate::support::RedisServer;

/// A test for each function, of its name. One that is left out is reported as never used.
macro_rules! trials {
    ($($test:path),* $(,)?) => {
        vec![$(Trial::test(stringify!($test), || {
            $test();
            Ok(())
        })),*]
    };
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = trials![
        docs::help_has_examples_and_exit_codes,
        docs::manual_pages_render,
        docs::completions_are_for_the_shell,
        docs::a_reader_that_leaves_early_is_no_failure,
        judging::choose_shows_every_kind_of_store,
        judging::choose_says_which_do_what_is_needed,
        judging::doctor_has_nothing_against_the_default_store,
        judging::doctor_says_what_makes_postgresql_unusable,
        judging::doctor_warns_of_a_ttl_that_the_store_does_not_keep,
        judging::doctor_says_why_a_store_is_not_reached,
        listing::ls_lists_what_is_held,
        listing::ls_says_where_names_are_not_known,
        listing::watch_leaves_at_once,
        listing::watch_writes_a_line_of_json_each_time,
        lost::case_28_is_ended_when_the_lock_is_taken_away,
        lost::a_stopped_child_is_ended_too,
        operators::status_shows_who_holds,
        operators::break_does_not_ask_nobody,
        operators::break_asks_on_a_terminal,
        operators::case_60_break_takes_away_only_what_was_shown,
        run::the_child_knows_its_lock_and_its_code_comes_back,
        run::standard_streams_and_arguments_are_the_childs,
        run::one_at_a_time,
        run::every_kind_of_failure_has_its_code,
        run::a_busy_lock_fails_or_is_skipped,
        run::the_default_store_is_the_users_state_folder,
        run::verbose_tells_what_happens_to_the_lock,
        run::credentials_are_never_shown,
        run::options_of_the_url_hold_unless_others_are_given,
        signals::case_29_leaves_at_once_while_waiting,
        signals::case_29_passes_signals_on_while_running,
        signals::what_was_ignored_at_the_start_stays_ignored,
        signals::the_code_comes_back_though_the_ends_of_children_were_ignored,
        signals::a_death_by_signal_comes_back_as_a_shell_tells_it,
        signals::stop_and_continuation_are_passed_on,
        signals::a_killed_run_takes_its_child_along,
        terminal::an_interactive_child_keeps_the_terminal,
        terminal::ctrl_c_reaches_the_child_once,
        terminal::ctrl_c_ends_the_script_around_it_too,
        terminal::ctrl_c_ends_the_waiting_and_the_script_around_it,
        terminal::ctrl_z_stops_and_fg_goes_on,
        terminal::a_background_job_asks_for_the_terminal_in_turn,
        terminal::the_rest_of_a_pipeline_keeps_the_terminal,
        terminal::ctrl_z_is_nothing_where_nobody_could_continue,
        terminal::the_terminal_is_left_as_it_was,
        terminal::colours_are_for_terminals,
    ];
    #[cfg(feature = "conformance")]
    trials.extend(trials![
        conformance::the_rules_are_listed,
        conformance::a_store_that_is_not_reached_is_said_in_one_line,
        conformance::files_keep_their_promises_and_nothing_is_left,
        conformance::etcd_keeps_its_promises_and_nothing_is_left,
    ]);
    let missing = RedisServer::missing();
    #[cfg(feature = "conformance")]
    let conformance_on_redis = trials![
        conformance::redis_keeps_its_promises_and_nothing_is_left,
        conformance::redis_behind_sentinels_keeps_its_promises_and_nothing_is_left,
        conformance::a_redis_cluster_keeps_its_promises_and_nothing_is_left,
        conformance::redis_over_tls_keeps_its_promises_and_nothing_is_left,
        conformance::a_broken_promise_is_told,
    ];
    #[cfg(not(feature = "conformance"))]
    let conformance_on_redis = Vec::new();
    let on_redis = trials![
        judging::doctor_examines_redis,
        judging::doctor_warns_of_a_clock_that_is_off,
        judging::doctor_says_what_makes_redis_unusable,
        listing::ls_lists_who_waits_on_redis,
        listing::ls_says_which_right_it_needs_on_redis,
        listing::watch_outlives_a_store_that_is_away,
        lost::case_28_is_ended_when_the_lock_is_taken_away_on_redis,
        lost::case_28_is_ended_before_a_silent_store_lets_go,
        lost::a_short_silence_is_lived_through,
        operators::status_shows_who_holds_on_redis,
        operators::case_60_break_takes_away_only_what_was_shown_on_redis,
        run::the_same_on_redis,
        signals::case_29_leaves_at_once_while_waiting_on_redis,
        signals::case_29_passes_signals_on_while_running_on_redis,
        terminal::a_stopped_job_whose_lock_ends_does_not_go_on,
    ];
    let on_redis = on_redis.into_iter().chain(conformance_on_redis);
    trials.extend(on_redis.map(|trial| match &missing {
        Some(missing) => trial.with_kind(missing.to_string()).with_ignored_flag(true),
        None => trial,
    }));
    libtest_mimic::run(&arguments, trials).exit_code()
}
