//! A process that stores is killed at random points; `KILLS=2000` for the long run.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{MINUTE, flush, get, prefix, put, small, tokens};
use kv_store::{Access, Config, Get, OpenError, Put, Store};

const LEN: usize = 6000;
const BLOCKS: usize = 6;
const PROMPTS: u32 = 40;
/// Cargo's name for what runs these tests where the processor is emulated.
const RUNNER: &str = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER";

/// A folder that is removed with its value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kv-store-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Either large enough for all prompts, or so small that segments are evicted all the time.
fn config(is_large: bool) -> Config {
    Config {
        max_bytes: if is_large { 8 << 20 } else { 96 << 10 },
        ..small()
    }
}

fn child(role: &str, folder: &Path, is_large: bool, seed: u64) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut command = match std::env::var(RUNNER) {
        Ok(runner) if cfg!(target_arch = "aarch64") => {
            let mut words = runner.split_whitespace();
            let mut command = Command::new(words.next().unwrap());
            command.args(words).arg(program);
            command
        }
        _ => Command::new(program),
    };
    command.args([
        "--exact",
        "child_process",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.env(
        "KV_STORE_CHILD",
        format!("{role} {is_large} {seed} {}", folder.display()),
    );
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// The killed process; not a test by itself. Prints each prompt once it is complete.
#[test]
fn child_process() {
    let Ok(arguments) = std::env::var("KV_STORE_CHILD") else {
        return;
    };
    let mut parts = arguments.splitn(4, ' ');
    let (role, is_large) = (parts.next().unwrap(), parts.next() == Some("true"));
    let mut seed: u64 = parts.next().unwrap().parse().unwrap();
    let store = Store::open(parts.next().unwrap(), config(is_large)).unwrap();
    let say = |text: &str| {
        println!("\n{text}");
        std::io::stdout().flush().unwrap();
    };
    say("opened");
    loop {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let number = (seed >> 33) as u32 % PROMPTS;
        let tokens = tokens(number, BLOCKS);
        (0..BLOCKS).for_each(|block| _ = put(&store, &prefix(&tokens).block(block), LEN));
        flush(&store);
        say(&format!("stored {number}"));
        if role == "slow" {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn hits(store: &Store, number: u32) -> usize {
    let tokens = tokens(number, BLOCKS);
    (0..BLOCKS)
        .filter(|&block| get(store, &prefix(&tokens).block(block), LEN) == Get::Hit)
        .count()
}

/// Microseconds in which a process starts and opens a store.
fn micros_to_open() -> u64 {
    let scratch = Scratch::new("first");
    let start = Instant::now();
    let mut process = child("fast", &scratch.0, true, 0).spawn().unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let opened = lines.map_while(Result::ok).any(|line| line == "opened");
    let took = start.elapsed();
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(opened);
    took.as_micros() as u64
}

#[test]
fn killed_at_any_point_it_opens_with_all_that_was_complete() {
    let kills: u64 = std::env::var("KILLS")
        .ok()
        .and_then(|kills| kills.parse().ok())
        .unwrap_or(50);
    let longest = 30_000 + 3 * micros_to_open();
    let (mut complete, mut partial, mut slowest) = (0, 0, Duration::ZERO);
    for is_large in [true, false] {
        let scratch = Scratch::new(if is_large { "large" } else { "evicting" });
        let mut stored = vec![false; PROMPTS as usize];
        for kill in 0..kills.div_ceil(2) {
            if kill % 20 == 0 {
                let _ = std::fs::remove_dir_all(&scratch.0);
                stored.fill(false);
            }
            let mut process = child(
                "fast",
                &scratch.0,
                is_large,
                kill * 7919 + u64::from(is_large),
            )
            .spawn()
            .unwrap();
            let lines = BufReader::new(process.stdout.take().unwrap());
            let printed =
                std::thread::spawn(move || lines.lines().map_while(Result::ok).collect::<Vec<_>>());
            // From before the folder exists to well into eviction.
            std::thread::sleep(Duration::from_micros(500 + kill * 104_729 % longest));
            process.kill().unwrap();
            process.wait().unwrap();
            for line in printed.join().unwrap() {
                if let Some(number) = line
                    .strip_prefix("stored ")
                    .and_then(|number| number.parse::<usize>().ok())
                {
                    stored[number] = true;
                }
            }
            let start = Instant::now();
            let store = Store::open(&scratch.0, config(is_large)).unwrap();
            slowest = slowest.max(start.elapsed());
            store.check().unwrap();
            for (number, &is_stored) in stored.iter().enumerate() {
                let hits = hits(&store, number as u32); // compares every byte
                complete += usize::from(hits == BLOCKS);
                partial += usize::from(hits > 0 && hits < BLOCKS);
                assert!(
                    !is_large || !is_stored || hits == BLOCKS,
                    "kill {kill}: prompt {number} has {hits} blocks"
                );
            }
            assert_eq!(store.stats().counters.damaged, 0);
            assert!(store.close(MINUTE));
        }
    }
    println!(
        "{kills} kills: {complete} prompts complete, {partial} in part, opened in {slowest:?} at most"
    );
    assert!(complete > 0);
}

#[test]
fn one_process_writes_and_others_read() {
    let scratch = Scratch::new("shared");
    let mut process = child("slow", &scratch.0, true, 1).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    assert!(lines.any(|line| line == "opened"));
    match Store::open(&scratch.0, config(true)) {
        Err(OpenError::Locked { pid, .. }) => assert_eq!(pid, Some(process.id())),
        other => panic!("{:?}", other.map(|store| store.stats())),
    }
    let reader = Store::open(
        &scratch.0,
        Config {
            access: Access::WriteOrRead,
            ..config(true)
        },
    )
    .unwrap();
    assert!(!reader.is_writer());
    let tokens = tokens(0, 1);
    assert!(matches!(
        put(&reader, &prefix(&tokens).block(0), LEN),
        Put::Dropped(_) | Put::Known
    ));
    let mut seen = 0;
    while seen < 20 {
        let Some(number) = lines
            .next()
            .and_then(|line| line.strip_prefix("stored ")?.parse().ok())
        else {
            continue;
        };
        reader.refresh().unwrap();
        reader.check().unwrap();
        assert_eq!(hits(&reader, number), BLOCKS, "prompt {number}");
        seen += 1;
    }
    process.kill().unwrap();
    process.wait().unwrap();
    let writer = Store::open(&scratch.0, config(true)).unwrap(); // the lock ends with its process
    assert!(writer.is_writer() && writer.stats().counters.loaded > 0);
    assert!(
        matches!(Store::open(&scratch.0, config(true)), Err(OpenError::Locked { pid: Some(pid), .. }) if pid == std::process::id())
    );
    drop(writer);
    assert!(Store::open(&scratch.0, config(true)).unwrap().is_writer());
}
