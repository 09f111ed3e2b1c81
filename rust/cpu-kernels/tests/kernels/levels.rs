//! Tests that run once for each level of instructions. One that this machine lacks is ignored, by name, and fails
//! where the environment variable `REQUIRE_ISA` asks for it: `REQUIRE_ISA=avx512,amx`. A level that is modelled runs, but
//! is not there for `REQUIRE_ISA`.

use std::process::ExitCode;

use cpu_kernels::Isa;
use libtest_mimic::{Arguments, Trial};
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};

/// Adds tests for each of some levels, named as their functions.
macro_rules! at {
    ($tests:expr, $levels:expr, $($test:ident),+ $(,)?) => {
        $($tests.at($levels, concat!(module_path!(), "::", stringify!($test)), $test);)+
    };
}

/// Adds tests that do not depend on the level.
macro_rules! once {
    ($tests:expr, $($test:ident),+ $(,)?) => {
        $($tests.once(concat!(module_path!(), "::", stringify!($test)), $test);)+
    };
}

/// Levels whose float32 results have the same bits.
pub(crate) const FLOATS: [Isa; 4] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512];

/// Levels that multiply bfloat16 itself.
pub(crate) const HALVES: [Isa; 2] = [Isa::Avx512Bf16, Isa::Amx];

/// The variable that makes missing levels failures.
const REQUIRED: &str = "REQUIRE_ISA";

/// No level, and those that make a difference elsewhere: `tools/levels.py` runs tests there.
const OTHERS: [&str; 2] = ["", "avx512_vnni"];

/// Collected tests.
pub(crate) struct Tests {
    trials: Vec<Trial>,
    required: Vec<Isa>,
}

impl Tests {
    /// None yet. Panics where `REQUIRE_ISA` names a level that is not known, or one that a model stands for.
    pub(crate) fn new() -> Self {
        let names = std::env::var(REQUIRED).unwrap_or_default();
        let level = |name: &str| match Isa::named(name) {
            None => panic!("{REQUIRED}={names}: {name} is none of {}", known()),
            Some(isa) if isa.is_modelled() => {
                panic!("{REQUIRED}={names}: {name} is a model here; test without modelled-tiles")
            }
            isa => isa,
        };
        let levels = names.split(',').filter(|name| !OTHERS.contains(name));
        Self {
            trials: vec![],
            required: levels.filter_map(level).collect(),
        }
    }

    /// A test for each of these levels. `path` begins with the crate.
    pub(crate) fn at(&mut self, levels: &[Isa], path: &str, test: fn(Isa)) {
        for &isa in levels {
            let (is_there, is_required) = (isa.is_there(), self.required.contains(&isa));
            let run = move || match is_there {
                true => {
                    test(isa);
                    Ok(())
                }
                false => Err(format!("this machine has no {}", isa.name()).into()),
            };
            let trial = Trial::test(format!("{}::{}", in_crate(path), isa.name()), run);
            self.trials
                .push(trial.with_ignored_flag(!is_there && !is_required));
        }
    }

    /// A test that does not depend on the level.
    pub(crate) fn once(&mut self, path: &str, test: fn()) {
        let run = move || {
            test();
            Ok(())
        };
        self.trials.push(Trial::test(in_crate(path), run));
    }

    /// Runs what the command line asks for, and says at which levels tests ran.
    pub(crate) fn run(&mut self) -> ExitCode {
        let arguments = Arguments::from_args();
        let is_list = arguments.list;
        let conclusion = libtest_mimic::run(&arguments, std::mem::take(&mut self.trials));
        if !is_list {
            let (there, lacking): (Vec<Isa>, Vec<Isa>) =
                Isa::ALL.into_iter().partition(|isa| isa.is_there());
            println!(
                "instruction levels of {}: {} ran; {} ignored: this machine lacks them\n",
                env!("CARGO_CRATE_NAME"),
                names(&there),
                names(&lacking),
            );
        }
        conclusion.exit_code()
    }
}

/// A path without the crate.
fn in_crate(path: &str) -> &str {
    path.split_once("::").map_or(path, |(_, rest)| rest)
}

/// Both kinds of levels.
pub(crate) fn all() -> Vec<Isa> {
    [&FLOATS[..], &HALVES[..]].concat()
}

/// Runs `test` on so many random values.
pub(crate) fn check<S: Strategy>(
    cases: u32,
    values: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..Default::default()
    };
    match TestRunner::new(config).run(&values, test) {
        Ok(()) => {}
        Err(TestError::Fail(reason, value)) => panic!("{reason}\nminimal value: {value:?}"),
        Err(error) => panic!("{error}"),
    }
}

fn known() -> String {
    Isa::ALL.map(Isa::name).join(", ")
}

fn names(levels: &[Isa]) -> String {
    match levels.is_empty() {
        true => "none".to_owned(),
        false => levels
            .iter()
            .map(|isa| match isa.is_modelled() {
                true => format!("{} (modelled)", isa.name()),
                false => isa.name().to_owned(),
            })
            .collect::<Vec<_>>()
            .join(", "),
    }
}
