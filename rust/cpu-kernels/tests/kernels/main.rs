//! All tests of the crate that use its public interface, in one program: each program would compile the generic code
//! that it calls again.

use std::process::ExitCode;

use levels::Tests;

#[macro_use]
mod levels;
mod float8;
mod functions;
mod imports;
mod linear;
mod norm;
mod oracle;
mod quantise;
mod quantized;
mod refusals;
mod rotation;
mod rows;
mod sampling;
mod states;
mod tiles;

fn main() -> ExitCode {
    let mut tests = Tests::new();
    float8::add(&mut tests);
    imports::add(&mut tests);
    linear::add(&mut tests);
    norm::add(&mut tests);
    oracle::add(&mut tests);
    quantise::add(&mut tests);
    quantized::add(&mut tests);
    refusals::add(&mut tests);
    rotation::add(&mut tests);
    rows::add(&mut tests);
    sampling::add(&mut tests);
    states::add(&mut tests);
    tiles::add(&mut tests);
    tests.run()
}
