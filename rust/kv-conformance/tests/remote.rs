//! Managers behind the line protocol are checked like any other.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // the other test uses the rest
mod naive;

use std::cell::Cell;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write, pipe};
use std::thread;

use kv_conformance::{BlockManager, Remote, Runs, check};
use naive::{Naive, flaw};

/// An adapter: answers calls until there are no more. `wrong` is answered to `num_computed`.
fn serve(flaw: u8, calls: PipeReader, mut answers: PipeWriter, wrong: Option<&str>) {
    let mut manager = Naive::new(flaw, 1, 1);
    for line in BufReader::new(calls).lines() {
        let line = line.unwrap();
        let (call, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let numbers: Vec<u64> = rest.split(' ').flat_map(str::parse).collect();
        let tokens = |from: usize| -> Vec<u32> {
            numbers[from..].iter().map(|token| *token as u32).collect()
        };
        let id = numbers.first().copied().unwrap_or_default();
        let mut answer = String::new();
        match call {
            "new" => {
                manager = Naive::new(flaw, numbers[0] as usize, numbers[1] as usize);
                answer += "reuses_live_prefixes deduplicates forks";
            }
            "add" => manager.add(id, numbers[1] as u8, &tokens(2)),
            "prefill" => match manager.prefill(id, numbers[1] as usize) {
                Some(prefilled) => answer = format!("{} {}", prefilled.cached, prefilled.computed),
                None => answer += "-",
            },
            "decode" => answer += if manager.decode(id) { "" } else { "-" },
            "copies" => assert!(manager.copies().is_empty()),
            "commit" => {
                let pairs = numbers.chunks(2);
                let sampled: Vec<_> = pairs.map(|pair| (pair[0], pair[1] as u32)).collect();
                manager.commit(&sampled);
            }
            "append" => manager.append(id, &tokens(1)),
            "fork" => manager.fork(id, numbers[1]),
            "preempt" => manager.preempt(id),
            "free" => manager.free(id),
            "table" => {
                for block in manager.table(id) {
                    answer += &format!("{block} ");
                }
            }
            "num_computed" => match wrong {
                Some("end") => return,
                Some(wrong) => answer += wrong,
                None => answer = manager.num_computed(id).to_string(),
            },
            "available" => answer = manager.available().to_string(),
            _ => answer = format!("error unknown: {line}"),
        }
        writeln!(answers, "{answer}").unwrap();
    }
}

fn remote(flaw: u8, wrong: Option<&'static str>) -> Remote {
    Remote::connected_by(move || {
        let ((answers, to_us), (calls, to_it)) = (pipe()?, pipe()?);
        thread::spawn(move || serve(flaw, calls, to_us, wrong));
        Ok((Box::new(BufReader::new(answers)), Box::new(to_it)))
    })
}

const FEW: Runs = Runs {
    seed: 1,
    pools: 20,
    operations: 300,
};

#[test]
fn the_same_is_observed_as_without_the_protocol() {
    let remote = remote(flaw::NONE, None);
    let report = check(&FEW, |blocks, size| remote.manager(blocks, size)).unwrap();
    assert_eq!(
        report,
        check(&FEW, |blocks, size| Naive::new(flaw::NONE, blocks, size)).unwrap()
    );
    assert!(report.steps > 100 && report.refusals > 100, "{report:?}");
}

#[test]
fn flaws_are_found() {
    let remote = remote(flaw::IGNORES_PREFIX, None);
    let failure = check(&Runs::default(), |blocks, size| {
        remote.manager(blocks, size)
    })
    .unwrap_err();
    let direct = check(&Runs::default(), |blocks, size| {
        Naive::new(flaw::IGNORES_PREFIX, blocks, size)
    })
    .unwrap_err();
    assert_eq!(failure.to_string(), direct.to_string());
}

#[test]
fn errors_wrong_answers_and_crashes_are_differences() {
    for (wrong, difference) in [
        (
            "error AssertionError: 7 blocks",
            "it panics: AssertionError: 7 blocks",
        ),
        (
            "seven",
            "it panics: num_computed 1 is answered by \"seven\"",
        ),
        (
            "1 2",
            "it panics: num_computed 1 is answered by Some([1, 2]), not by a number",
        ),
        (
            "end",
            "it panics: num_computed 1 has no answer: unexpected end of file",
        ),
    ] {
        let remote = remote(flaw::NONE, Some(wrong));
        let failure = check(&FEW, |blocks, size| remote.manager(blocks, size)).unwrap_err();
        assert_eq!(failure.difference, difference);
        assert_eq!(failure.operations.len(), 1, "{failure}"); // an added sequence
    }
}

#[test]
fn the_program_is_connected_again_after_it_ended() {
    let connections = std::rc::Rc::new(Cell::new(0));
    let counted = connections.clone();
    let remote = Remote::connected_by(move || {
        counted.set(counted.get() + 1);
        let ((answers, to_us), (calls, to_it)) = (pipe()?, pipe()?);
        let wrong = (counted.get() == 1).then_some("end");
        thread::spawn(move || serve(flaw::NONE, calls, to_us, wrong));
        Ok((Box::new(BufReader::new(answers)), Box::new(to_it)))
    });
    check(&FEW, |blocks, size| remote.manager(blocks, size)).unwrap_err();
    check(&FEW, |blocks, size| remote.manager(blocks, size)).unwrap();
    assert_eq!(connections.get(), 2);
}

#[test]
fn a_program_that_is_not_there_is_a_difference() {
    let remote = Remote::program(vec!["no-such-program".to_owned()]);
    let failure = check(&FEW, |blocks, size| remote.manager(blocks, size)).unwrap_err();
    assert!(failure.difference.contains("has no answer"), "{failure}");
}
