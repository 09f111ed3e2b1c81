//! Recordings: what is in them, what a replay says of those that are cut, damaged, altered or lies.
//! That random operations are replayed to the same end is seen to by the property test.

#[path = "../../kv-core/tests/model/recording.rs"]
mod recording;

use std::io::{self, Write};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kv_core::{Answer, BlockManager, Call, Config, Error, Eviction, Namespace, Prefill, Reserve};
use kv_trace::{Limits, Record, Replay, Report, TraceError, replay, replay_within};
use recording::Recording;

/// Every kind of operation once at least: its manager, not recorded any more, and its recording.
fn session(config: Config) -> (BlockManager, Vec<u8>) {
    let recording = Recording::default();
    let mut manager = BlockManager::new(config).expect("valid");
    manager.record(recording.clone()).expect("new");
    every_operation(&mut manager).expect("no misuse");
    manager.stop_recording().expect("memory takes everything");
    (manager, recording.bytes())
}

fn every_operation(m: &mut BlockManager) -> Result<(), Error> {
    let prompt: Vec<u32> = (0..10).map(|token| token * 20_000).collect();
    let first = m.sequence(prompt.clone(), b"", true)?;
    let equal = m.sequence(vec![1, 2, 3], b"tenant", true)?;
    let also = m.sequence(vec![1, 2, 3], b"tenant", true)?;
    let plan = m.begin_step(64)?;
    for seq in [&first, &equal, &also] {
        m.prefill(plan.key(), seq.key(), 64, Some(0))?;
    }
    m.cancel(plan.key(), also.key())?;
    m.prefill(plan.key(), also.key(), 64, None)?;
    m.copies(plan.key())?;
    m.commit(plan.key(), &[7, 7, 7])?;
    // The blocks of both become full and equal: a merge.
    let plan = m.begin_step(64)?;
    m.decode(plan.key(), &[equal.key(), also.key()], 2)?;
    m.speculate(plan.key(), first.key(), &[8, 9])?;
    let remappings = m.commit_accepted(plan.key(), &[5, 5, 8, 4], &[1, 1, 2])?;
    assert_eq!(remappings.len(), 1);
    let plan = m.begin_step(3)?;
    m.decode(plan.key(), &[equal.key()], 0)?;
    let taken = m.draft(plan.key(), &[equal.key()], &[6, 7, 8], &[3])?;
    assert_eq!(taken, [2]);
    m.rollback(plan.key())?;
    m.trim(first.key(), 12)?;
    let fork = m.fork(first.key(), 6)?;
    m.append(fork.key(), &[70_000, 80_000])?;
    let pin = m.pin(first.key())?;
    m.reset(first.key())?;
    m.attach(first.key(), &pin)?;
    let matched = m.match_prefix(&prompt, b"")?;
    assert_eq!(matched.num_blocks(), 2);
    thread::spawn(|| drop((pin, matched)))
        .join()
        .expect("no panic");
    m.free(also.key())?;
    let plan = m.begin_step(1)?;
    m.prefill(plan.key(), fork.key(), 1, Some(100))?;
    m.rollback(plan.key())?;
    drop(m.begin_step(9)?);
    drop(fork);
    let loose = m.sequence(prompt, b"", true)?;
    m.want_snapshots(loose.key(), &[4, 8])?;
    assert_eq!(m.reuse_cached(loose.key())?, 8);
    m.keep_snapshot(loose.key())?; // a model without states: nothing
    m.extend(loose.key(), 3)?;
    m.publish(loose.key(), 3, &[90_000])?;
    m.free_keeping(loose.key(), 8)?;
    let restored = m.sequence((500..510).collect(), b"", true)?;
    for end in 0..3 {
        let Reserve::Reserved(transfer) = m.reserve(restored.key(), 10)? else {
            panic!("no transfer");
        };
        match end {
            0 => drop(transfer),
            1 => m.abandon(transfer.key())?,
            _ => assert_eq!(m.complete(transfer.key(), 2)?, 8),
        }
    }
    drop(m.evict(1));
    m.evict_all();
    m.advance_weights_version()?;
    let namespace = Namespace::switching(b"tenant", 1, b"adapter");
    drop(m.sequence(vec![1, 2, 3], namespace, true)?);
    drop(m.match_prefix(&[1, 2, 3], namespace)?);
    assert_eq!(m.usage().num_blocks(), 9);
    drop((first, equal));
    Ok(())
}

/// With a seed, so that damage to its recording is the same every time.
fn small() -> Config {
    Config {
        hash_seed: Some(1),
        ..Config::new(9, 4)
    }
}

fn verdict(recording: &[u8]) -> Result<Report, TraceError> {
    let limits = Limits {
        num_blocks: 100,
        ..Limits::default()
    };
    replay_within(recording, limits)
}

#[test]
fn every_kind_is_recorded_and_replayed() {
    for eviction in [Eviction::Lru, Eviction::TwoQueue] {
        let config = Config {
            eviction,
            events: true,
            hash_bits: 127,
            hash_seed: None,
            ..small()
        };
        let (mut manager, recording) = session(config);
        let report = replay(&recording[..]).expect("whole");
        assert_eq!(report.divergence, None);
        assert_eq!(report.check, Ok(()));
        assert!(report.complete);
        assert_eq!(
            (report.usage, report.stats),
            (manager.usage(), manager.stats())
        );
        assert_eq!(report.recorded_by, env!("CARGO_PKG_VERSION"));
        let kinds: Vec<_> = report.operations.iter().map(|(kind, _)| *kind).collect();
        let operations = Call::KINDS.iter().copied();
        let operations = operations.filter(|&kind| kind != "stop_recording");
        assert_eq!(kinds, operations.collect::<Vec<_>>());
        let Config {
            num_blocks,
            block_size,
            events,
            hash_seed,
            hash_bits,
            ..
        } = report.config;
        assert_eq!(
            (num_blocks, block_size, events, hash_bits),
            (9, 4, true, 127)
        );
        assert_eq!(report.config.eviction, eviction);
        assert_eq!(hash_seed, Some(manager.hasher().seed()));
    }
}

#[test]
fn a_recording_is_compact() {
    let recording = Recording::default();
    let mut manager = BlockManager::new(Config::new(4096, 16)).expect("valid");
    manager.record(recording.clone()).expect("new");
    let seqs: Vec<_> = (0..256)
        .map(|id| manager.sequence(vec![id; 15], b"", true).expect("tokens"))
        .collect();
    let plan = manager.begin_step(8192).expect("none open");
    for seq in &seqs {
        let answer = manager.prefill(plan.key(), seq.key(), 64, Some(0));
        assert!(matches!(answer, Ok(Prefill::Planned { .. })));
    }
    manager
        .commit(plan.key(), &[40_000; 256])
        .expect("256 samples");
    let keys: Vec<_> = seqs.iter().map(|seq| seq.key()).collect();
    for _ in 0..100 {
        let plan = manager.begin_step(8192).expect("none open");
        manager.decode(plan.key(), &keys, 0).expect("all decode");
        manager
            .commit(plan.key(), &[40_000; 256])
            .expect("256 samples");
    }
    manager.stop_recording().expect("memory takes everything");
    // A byte for each sequence and three for its token.
    let len = recording.bytes().len();
    assert!(len < 100 * (256 * 4 + 40) + 256 * 60, "{len} bytes");
}

#[test]
fn a_cut_is_noticed_wherever_it_is() {
    let (_, recording) = session(small());
    let whole = replay(&recording[..]).expect("whole");
    let count = |report: &Report| {
        report
            .operations
            .iter()
            .map(|(_, count)| count)
            .sum::<u64>()
    };
    let mut boundaries = 0;
    for len in 0..recording.len() {
        match verdict(&recording[..len]) {
            Ok(report) => {
                boundaries += 1;
                assert!(!report.complete && report.divergence.is_none());
                assert!(count(&report) <= count(&whole));
            }
            Err(TraceError::Cut { byte, operation }) => {
                assert_eq!(byte, len as u64);
                assert!(operation <= count(&whole) + 1);
            }
            Err(error) => panic!("{len} bytes: {error}"),
        }
    }
    assert_eq!(boundaries, count(&whole) + 1); // after the header and after each operation
    let error = verdict(&recording[..recording.len() - 1]).expect_err("cut");
    let last = format!(
        "cut at byte {}, in operation {}",
        recording.len() - 1,
        count(&whole) + 1
    );
    assert!(error.to_string().contains(&last), "{error}");
}

#[test]
fn damage_is_noticed_and_never_a_panic() {
    let (_, recording) = session(small());
    let mut corrupt = 0;
    for at in 0..recording.len() {
        for bit in 0..8 {
            let mut damaged = recording.clone();
            damaged[at] ^= 1 << bit;
            match verdict(&damaged) {
                Ok(report) => panic!("byte {at}, bit {bit} went by: {:?}", report.divergence),
                Err(TraceError::Corrupt { .. }) => corrupt += 1,
                Err(_) => {}
            }
        }
    }
    assert!(corrupt > recording.len() * 5, "{corrupt}");
    let twice = [&recording[..], &recording[recording.len() - 8..]].concat();
    assert!(verdict(&twice).is_err());
}

/// Damage whose checks fit, so that all of it is replayed: bytes changed, operations swapped, twice,
/// gone. Whatever it says, a replay neither panics nor leaves a manager that is not sound.
#[test]
fn forgeries_are_replayed_and_never_a_panic() {
    let (_, recording) = session(small());
    let mut state = 1_u64;
    let mut below = |bound: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % bound as u64) as usize
    };
    let (mut refused, mut parted) = (0, 0);
    for _ in 0..3_000 {
        let forged = forge(&recording, |bodies| {
            for _ in 0..=below(3) {
                let (at, other) = (1 + below(bodies.len() - 1), 1 + below(bodies.len() - 1));
                match below(6) {
                    0 => bodies.swap(at, other),
                    1 => bodies.insert(at, bodies[other].clone()),
                    2 => drop(bodies.remove(at)),
                    _ => {
                        let byte = below(bodies[at].len());
                        bodies[at][byte] = [0, 1, 2, 3, 5, 20, 127, 128, 255][below(9)];
                    }
                }
            }
        });
        match verdict(&forged) {
            Ok(report) => {
                assert_eq!(report.check, Ok(()));
                parted += u32::from(report.divergence.is_some());
            }
            Err(TraceError::Corrupt { .. } | TraceError::Limit { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 500 && parted > 500, "{refused} {parted}");
}

#[test]
fn layer_groups_are_recorded() {
    let recording = Recording::default();
    let groups = vec![None, Some(5), Some(usize::MAX - 1), None];
    let mut manager = BlockManager::new(Config {
        groups: groups.clone(),
        ..small()
    })
    .expect("valid");
    manager.record(recording.clone()).expect("new");
    manager.stop_recording().expect("memory takes everything");
    let report = verdict(&recording.bytes()).expect("whole");
    assert_eq!(report.config.groups, groups);
    assert!(report.complete);
}

/// Where the head ends, and each frame: the length, the check, the body.
fn frames(recording: &[u8]) -> (usize, Vec<Vec<u8>>) {
    let (head, mut at, mut bodies) = (9, 9, Vec::new());
    while at < recording.len() {
        let len = usize::from(recording[at]);
        assert!(len < 128, "short frames only");
        bodies.push(recording[at + 3..][..len].to_vec());
        at += 3 + len;
    }
    (head, bodies)
}

/// How the bodies of this kind of operation begin.
fn kind(name: &str) -> u8 {
    let at = Call::KINDS.iter().position(|&kind| kind == name);
    at.expect("a kind") as u8
}

/// The recording with other bodies, as one who wants it to be believed would write it.
fn forge(recording: &[u8], change: impl FnOnce(&mut Vec<Vec<u8>>)) -> Vec<u8> {
    let (head, mut bodies) = frames(recording);
    change(&mut bodies);
    let mut forged = recording[..head].to_vec();
    for (operation, body) in bodies.iter().enumerate() {
        let check = xxhash_rust::xxh3::xxh3_64_with_seed(body, operation as u64) as u16;
        forged.push(body.len() as u8);
        forged.extend(check.to_le_bytes());
        forged.extend(body);
    }
    forged
}

#[test]
fn an_answer_that_is_not_given_again_is_named() {
    let (_, recording) = session(small());
    assert_eq!(forge(&recording, |_| ()), recording);
    let (_, bodies) = frames(&recording);
    let begin = bodies
        .iter()
        .position(|body| body[0] == kind("begin_step"))
        .expect("a begin_step");
    let forged = forge(&recording, |bodies| {
        *bodies[begin].last_mut().expect("the serial") = 77;
    });
    let report = verdict(&forged).expect("readable");
    let divergence = report.divergence.expect("the answer was altered");
    assert_eq!(divergence.operation, begin as u64);
    assert_eq!(divergence.call, Call::BeginStep { token_budget: 64 });
    assert_eq!(divergence.recorded, Answer::Number(77));
    assert_eq!(divergence.obtained, Ok(Answer::Number(1)));
    let done: u64 = report.operations.iter().map(|(_, count)| count).sum();
    assert_eq!(done, begin as u64 - 1, "nothing is replayed after it");
    assert_eq!(
        divergence.to_string(),
        "operation 4, begin_step(token_budget=64): recorded 77; obtained 1"
    );
}

#[test]
fn a_replay_goes_operation_by_operation() {
    let (_, recording) = session(small());
    let report = replay(&recording[..]).expect("whole");
    let total: u64 = report.operations.iter().map(|(_, count)| count).sum();
    let mut steps = Replay::open(&recording[..], Limits::default()).expect("a recording");
    assert_eq!(steps.recorded_by(), report.recorded_by);
    assert_eq!(steps.config().num_blocks, report.config.num_blocks);
    let (mut done, mut last) = (0, None);
    while let Some(operation) = steps.advance().expect("whole") {
        done += 1;
        assert_eq!(operation.number, done);
        assert_eq!(steps.manager().check(), Ok(()));
        let ids: Vec<u64> = steps.sequences().iter().map(|view| view.id).collect();
        assert!(ids.is_sorted());
        if let (Call::Sequence { tokens, .. }, Answer::Number(id)) =
            (&operation.call, &operation.answer)
        {
            let views = steps.sequences();
            let view = views.iter().find(|view| view.id == *id);
            assert_eq!(view.expect("alive").tokens, &tokens[..]);
        }
        last = Some((operation.call_text(), operation.answer_text()));
    }
    assert_eq!(done, total + 1); // and the end
    let (call, answer) = last.expect("operations");
    assert_eq!(call, "stop_recording()");
    assert!(answer.starts_with(&format!("{} blocks free", report.usage.free)));
    let again = steps.report();
    assert_eq!((again.usage, again.stats), (report.usage, report.stats));
}

#[test]
fn it_ends_before_an_operation_that_is_answered_differently() {
    let (_, recording) = session(small());
    let (_, bodies) = frames(&recording);
    let begin = bodies.iter().position(|body| body[0] == kind("begin_step"));
    let begin = begin.expect("a begin_step");
    let forged = forge(&recording, |bodies| {
        *bodies[begin].last_mut().expect("the serial") = 77;
    });
    let mut steps = Replay::open(&forged[..], Limits::default()).expect("a recording");
    let mut done = 0;
    while steps.advance().expect("whole").is_some() {
        done += 1;
    }
    assert_eq!(steps.advance().expect("whole"), None);
    let divergence = steps.divergence().expect("another answer").clone();
    assert_eq!(
        (divergence.operation, done),
        (begin as u64, begin as u64 - 1)
    );
    assert_eq!(steps.report().divergence, Some(divergence));
}

#[test]
fn a_call_that_is_refused_is_named() {
    let (_, recording) = session(small());
    let (_, bodies) = frames(&recording);
    let rollback = bodies
        .iter()
        .position(|body| body[0] == kind("rollback"))
        .expect("a rollback");
    let empty = vec![kind("sequence"), 0, 0, 1, 1, 1]; // a sequence without tokens or namespace; answer: number 1
    let forged = forge(&recording, |bodies| bodies.insert(1, empty));
    let divergence = verdict(&forged)
        .expect("readable")
        .divergence
        .expect("refused");
    assert_eq!(divergence.obtained, Err(Error::EmptySequence));
    let forged = forge(&recording, |bodies| {
        bodies.insert(rollback, bodies[rollback].clone())
    });
    let error = verdict(&forged).expect_err("a step that is not there");
    assert!(error.to_string().contains("step 3 is not there"), "{error}");
}

#[test]
fn headers_that_cannot_be_served() {
    let (_, recording) = session(small());
    assert!(matches!(
        verdict(b"GGUF and more"),
        Err(TraceError::NotATrace)
    ));
    assert!(matches!(
        verdict(b""),
        Err(TraceError::Cut {
            byte: 0,
            operation: 0
        })
    ));
    let none = forge(&recording, |bodies| bodies[0][SETTINGS] = 0);
    assert!(matches!(
        verdict(&none),
        Err(TraceError::Config(Error::OutOfRange {
            name: "num_blocks",
            ..
        }))
    ));
    for name in [&b"\x1b[2J"[..], b"", &[b'1'; 70], b"\xff"] {
        let mut body = vec![name.len() as u8];
        body.extend(name);
        let forged = forge(&recording, |bodies| {
            body.extend(&bodies[0][SETTINGS..]);
            bodies[0] = body;
        });
        let error = verdict(&forged).expect_err("a name that cannot be shown");
        assert!(
            error.to_string().contains("which version recorded"),
            "{error}"
        );
    }
    let longer = forge(&recording, |bodies| bodies[0].push(0));
    let error = verdict(&longer).expect_err("more settings than there are");
    assert!(
        error.to_string().contains("goes on after its end"),
        "{error}"
    );
}

/// Where the settings begin in a header, with the number of blocks.
const SETTINGS: usize = 1 + env!("CARGO_PKG_VERSION").len();

#[test]
fn another_format_is_refused_by_its_writer() {
    let (_, recording) = session(small());
    let said = |format: u8| {
        let mut other = recording.clone();
        other[8] = format;
        verdict(&other).expect_err("another format").to_string()
    };
    let version = env!("CARGO_PKG_VERSION");
    for format in [0, 1, 2, 127] {
        assert_eq!(
            said(format),
            format!(
                "the recording has format {format}, this version reads format 5; version {version} \
                 wrote it: replay it with that one, or record again"
            )
        );
    }
    // As the first format began: the settings by their numbers.
    let body = b"\x050.1.0\x01\x08\x02\x04\x03\x01";
    let check = xxhash_rust::xxh3::xxh3_64_with_seed(body, 0) as u16;
    let first = [b"kvtrace\n\x01\x0c", &check.to_le_bytes()[..], body].concat();
    let error = verdict(&first).expect_err("the first format");
    assert!(matches!(
        error,
        TraceError::Version { found: 1, supported: 5, recorded_by: Some(version) } if version == "0.1.0"
    ));
    // The writer's name is missing or cannot be shown.
    for header in [&b""[..], b"\x05", b"\x04\0\0abcd"] {
        let error = verdict(&[b"kvtrace\n\x07", header].concat()).expect_err("no header");
        assert!(matches!(
            error,
            TraceError::Version {
                found: 7,
                recorded_by: None,
                ..
            }
        ));
    }
}

/// A file may ask for much in a few bytes: it gets what the limits say.
#[test]
fn a_replay_takes_what_it_is_allowed() {
    let limits = Limits {
        num_blocks: 9,
        tokens: 100,
        operation: 200,
    };
    let said = |recording: &[u8]| match replay_within(recording, limits) {
        Err(error @ TraceError::Limit { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let (_, whole) = session(small());
    replay_within(&whole[..], limits).expect("that much");
    // 2^31 blocks of 2^16 tokens in a short file.
    let huge = forge(&whole, |bodies| {
        let settings = [0x80, 0x80, 0x80, 0x80, 8, 0x80, 0x80, 4];
        bodies[0].splice(SETTINGS..SETTINGS + 2, settings);
    });
    assert!(
        said(&huge)
            .starts_with("the recorded pool's number of blocks is 2147483648, a replay takes 9")
    );
    let tall = forge(&whole, |bodies| bodies[0][SETTINGS + 1] = 12);
    assert!(said(&tall).starts_with("the recorded pool's number of token positions is 108, "));
    let long = [&whole[..], &[0xff, 0xff, 0xff, 0xff, 0x7f]].concat();
    assert!(
        said(&long).starts_with("the length in bytes of operation"),
        "{}",
        said(&long)
    );

    let recorded = |play: fn(&mut BlockManager, &[u32])| {
        let recording = Recording::default();
        let mut manager = BlockManager::new(small()).expect("valid");
        manager.record(recording.clone()).expect("new");
        play(&mut manager, &[5; 30]);
        drop(manager);
        recording.bytes()
    };
    let forks = recorded(|manager, tokens| {
        let seq = manager
            .sequence(tokens.to_vec(), b"", true)
            .expect("tokens");
        for _ in 0..2 {
            let fork = manager.fork(seq.key(), 30).expect("so long");
            manager.free(fork.key()).expect("live");
        }
        let forks = [0; 3].map(|_| manager.fork(seq.key(), 30).expect("so long"));
        drop(forks);
    });
    assert!(said(&forks).starts_with("what sequences and pins hold at operation 8 is 120, "));
    let pins = recorded(|manager, tokens| {
        let seq = manager
            .sequence(tokens.to_vec(), b"", true)
            .expect("tokens");
        let plan = manager.begin_step(64).expect("none open");
        manager
            .prefill(plan.key(), seq.key(), 64, None)
            .expect("fresh");
        manager.commit(plan.key(), &[1]).expect("one");
        for _ in 0..20 {
            drop(manager.pin(seq.key()).expect("live"));
            manager.drain_deferred();
        }
        let _pins = [0; 11].map(|_| manager.pin(seq.key()).expect("live"));
    });
    assert!(
        said(&pins).contains(" is 107, a replay takes 100 at most"),
        "{}",
        said(&pins)
    );
}

#[test]
fn a_recording_begins_with_a_new_manager() {
    let recording = Recording::default();
    let mut manager = BlockManager::new(small()).expect("valid");
    drop(manager.match_prefix(&[1, 2, 3, 4], b"")); // finds nothing and leaves nothing
    drop(manager.sequence(vec![1], b"", true).expect("a token"));
    let used = Error::NotNew {
        sequences: 1,
        steps: 0,
    };
    assert_eq!(manager.record(recording.clone()), Err(used.clone()));
    assert_eq!(manager.check_recordable(), Err(used));
    assert!(recording.bytes().is_empty());
    manager.stop_recording().expect("there is nothing to stop");

    let mut manager = BlockManager::new(small()).expect("valid");
    manager.record(recording.clone()).expect("new");
    assert_eq!(manager.record(Recording::default()), Err(Error::Recording));
    manager.stop_recording().expect("memory takes everything");
    assert!(replay(&recording.bytes()[..]).expect("whole").complete);
    // A manager that was dropped leaves what it has done, but no end.
    let recording = Recording::default();
    let mut manager = BlockManager::new(small()).expect("valid");
    manager.record(recording.clone()).expect("new");
    drop(manager.sequence(vec![1], b"", true).expect("a token"));
    drop(manager);
    let report = replay(&recording.bytes()[..]).expect("whole");
    assert_eq!(
        (report.complete, report.operations),
        (false, vec![("sequence", 1)])
    );
}

/// Takes a few bytes, then fails.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let taken = self.0.min(bytes.len());
        self.0 -= taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_ends_the_recording_and_nothing_else() {
    for capacity in [0, 100, 9_000] {
        let mut manager = BlockManager::new(small()).expect("valid");
        manager.record(Full(capacity)).expect("new");
        for _ in 0..20 {
            every_operation(&mut manager).expect("goes on");
            manager.sequence(vec![9; 4000], b"", true).expect("tokens");
        }
        manager.check().expect("sound");
        let error = manager.stop_recording().expect_err("the disk is full");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        every_operation(&mut manager).expect("goes on");
        manager.check().expect("sound");
        manager.stop_recording().expect("recorded");
    }
}

/// Takes nothing before it is released.
struct Stuck(mpsc::Receiver<()>);

impl Write for Stuck {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        _ = self.0.recv();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_writer_that_is_stuck_stops_no_call() {
    let (release, stuck) = mpsc::channel();
    let mut manager = BlockManager::new(small()).expect("valid");
    manager.record(Stuck(stuck)).expect("new");
    let mut sequences = 0;
    while manager.is_recording() {
        every_operation(&mut manager).expect("goes on");
        manager
            .sequence(vec![u32::MAX; 100_000], b"", true)
            .expect("tokens");
        sequences += 1;
        assert!(sequences < 1_000, "what waits to be written is bounded");
    }
    manager.check().expect("sound");
    let error = manager.stop_recording().expect_err("not all was written");
    let said = error.to_string();
    assert!(
        said.contains("the recording ended before operation"),
        "{said}"
    );
    manager.stop_recording().expect("recorded");
    drop(release);
}

#[test]
fn a_recording_is_waited_for_without_the_manager() {
    let (release, stuck) = mpsc::channel();
    let mut manager = BlockManager::new(small()).expect("valid");
    manager.record(Stuck(stuck)).expect("new");
    every_operation(&mut manager).expect("recorded");
    let mut ended = manager.end_recording().expect("there is one");
    every_operation(&mut manager).expect("goes on");
    assert!(
        ended.wait(Duration::from_millis(10)).is_none(),
        "nothing is written"
    );
    drop(release);
    let done = ended.wait(Duration::from_secs(60));
    done.expect("all is written").expect("without an error");
    assert!(manager.end_recording().is_none());
}

/// Pins that other threads drop while the manager works: wherever that falls, it is replayed there.
#[test]
fn drops_on_other_threads_are_replayed_where_they_fell() {
    let recording = Recording::default();
    let mut manager = BlockManager::new(Config::new(8, 1)).expect("valid");
    manager.record(recording.clone()).expect("new");
    thread::scope(|scope| {
        for round in 0..500_u32 {
            let seq = manager
                .sequence(vec![round % 5, 6, round % 3], b"", true)
                .expect("tokens");
            let plan = manager.begin_step(64).expect("none open");
            match manager
                .prefill(plan.key(), seq.key(), 64, None)
                .expect("fresh")
            {
                Prefill::Planned { .. } => drop(manager.commit(plan.key(), &[1]).expect("one")),
                _ => manager.rollback(plan.key()).expect("open"),
            }
            let pins = [
                manager.pin(seq.key()).expect("live"),
                manager
                    .match_prefix(&[round % 5, 6], b"")
                    .expect("a short namespace"),
            ];
            scope.spawn(move || drop((pins, seq)));
            manager.check().expect("sound while they go");
        }
    });
    manager.check().expect("sound");
    manager.stop_recording().expect("memory takes everything");
    let report = replay(&recording.bytes()[..]).expect("whole");
    assert_eq!(report.divergence, None);
    assert_eq!(
        (report.usage, report.stats),
        (manager.usage(), manager.stats())
    );
    assert_eq!((report.usage.active, report.usage.pinned), (0, 0));
}

/// Counts that are as large as they can be are counts like others.
#[test]
fn the_largest_numbers_do_not_wrap() {
    let mut manager = BlockManager::new(small()).expect("valid");
    let seq = manager.sequence(vec![1, 2], b"", true).expect("tokens");
    let plan = manager.begin_step(usize::MAX).expect("none open");
    let (plan, key) = (plan.key(), seq.key());
    manager
        .prefill(plan, key, usize::MAX, Some(0))
        .expect("fresh");
    let counts = [usize::MAX, 2];
    assert!(manager.commit_accepted(plan, &[1], &counts[..1]).is_err());
    assert!(manager.commit_accepted(plan, &[1], &counts).is_err());
    manager.commit(plan, &[3]).expect("one");
    let plan = manager.begin_step(usize::MAX).expect("none open");
    assert_eq!(manager.decode(plan.key(), &[key], usize::MAX), Ok(vec![0]));
    manager.check().expect("sound");
}
