// Counts what a kernel asks of shared and global memory, wave by wave, as the hardware serves it.
//
// An access of a wave is what its lanes do at one place of the code for the n-th time. Shared memory has 32 banks of
// 4 bytes and serves 128 bytes at a time: all lanes of 32 for 4-byte accesses, half of them for 8 bytes, a quarter for
// 16. Two different words of one bank in such a phase cost a turn more, which is a conflict. Global memory is
// counted in segments of 128 bytes that an access touches.
//
// Accesses of 4 or 8 bytes that follow each other within 16 aligned bytes are taken for one: that is what a card's
// compiler makes of the members of a Float4, where the host's takes them one by one. The first block of a launch and
// the last are counted: the others do what the first does.
#pragma once

#include <map>
#include <string>

#include "sim/block.hpp"

namespace strata::sim::traffic {

void count(bool on);  // and forget what was counted

void record(const void* address, std::size_t bytes, bool write, bool shared, const void* caller);
void block_begins(Block& block);
void block_ends(Block& block);

struct Tally {
    long accesses = 0;   // of waves
    long conflicts = 0;  // turns beyond the first of a phase
};

struct Counts {
    Tally shared_reads;
    Tally shared_writes;
    long global_accesses = 0;
    long segments = 0;
    long least_segments = 0;  // that hold as many bytes
};

std::map<std::string, Counts> by_kernel();
std::string table();  // the same as text

}  // namespace strata::sim::traffic
