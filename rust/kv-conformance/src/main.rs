//! Checks the block managers of another program.

use std::process::ExitCode;
use std::{env, panic};

use kv_conformance::{BlockManager, Promises, Remote, Runs, check};

const USAGE: &str =
    "usage: kv-conformance [--seed N] [--pools N] [--operations N] PROGRAM [ARGUMENT ...]

PROGRAM reads calls from standard input and answers them on standard output, a line each.
https://docs.rs/kv-conformance has the protocol.";

fn main() -> ExitCode {
    let Some((runs, program)) = arguments() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    panic::set_hook(Box::new(|_| {})); // a panic is a difference, and shortening repeats it
    let remote = Remote::program(program);
    let promises = panic::catch_unwind(panic::AssertUnwindSafe(|| remote.manager(8, 4).promises()));
    if let Ok(promises) = promises {
        print_promises(promises);
    }
    match check(&runs, |num_blocks, block_size| {
        remote.manager(num_blocks, block_size)
    }) {
        Ok(report) => {
            println!(
                "conforms: {} pools of {} operations",
                runs.pools, runs.operations
            );
            println!(
                "{} steps, {} cached tokens, {} refusals, {} copies",
                report.steps, report.cached_tokens, report.refusals, report.copies
            );
            ExitCode::SUCCESS
        }
        Err(failure) => {
            print!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn arguments() -> Option<(Runs, Vec<String>)> {
    let mut runs = Runs::default();
    let mut words = env::args().skip(1).peekable();
    while let Some(option) = words.next_if(|word| word.starts_with('-')) {
        let value = words.next()?;
        match option.as_str() {
            "--seed" => runs.seed = value.parse().ok()?,
            "--pools" => runs.pools = value.parse().ok()?,
            "--operations" => runs.operations = value.parse().ok()?,
            _ => return None,
        }
    }
    let program: Vec<_> = words.collect();
    (!program.is_empty()).then_some((runs, program))
}

fn print_promises(promises: Promises) {
    let rows = [
        (
            "reuses prefixes of live sequences",
            promises.reuses_live_prefixes,
        ),
        ("stores equal full blocks once", promises.deduplicates),
        ("forks", promises.forks),
    ];
    for (promise, is_promised) in rows {
        println!(
            "{promise}: {}",
            if is_promised {
                "promised, checked"
            } else {
                "not promised, not checked"
            }
        );
    }
}
