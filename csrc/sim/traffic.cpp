#include "sim/traffic.hpp"

#include <algorithm>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <unordered_map>

#include "sim/source_line.hpp"

namespace strata::sim::traffic {
namespace {

constexpr std::size_t kBanks = 32;
constexpr std::size_t kPhaseBytes = kBanks * 4;
constexpr std::size_t kSegment = 128;

struct Entry {
    const void* caller;
    std::uintptr_t address;
    std::size_t bytes;
    bool write;
    bool shared;
    std::size_t lane = 0;
};

bool counting = false;
std::map<const void*, Counts> counts_of;                                 // a kernel
std::unordered_map<const Block*, std::vector<std::vector<Entry>>> logs;  // of each thread

// One access of a wave to shared memory.
void count_shared(const std::vector<Entry>& lanes, Tally* tally) {
    tally->accesses += 1;
    const std::size_t at_once = std::max<std::size_t>(1, kPhaseBytes / std::max<std::size_t>(4, lanes[0].bytes));
    for (std::size_t i = 0; i < lanes.size();) {
        std::set<std::uintptr_t> words[kBanks];
        const std::size_t phase = lanes[i].lane / at_once;
        for (; i < lanes.size() && lanes[i].lane / at_once == phase; ++i) {
            for (std::uintptr_t word = lanes[i].address / 4; word <= (lanes[i].address + lanes[i].bytes - 1) / 4;
                 ++word) {
                words[word % kBanks].insert(word);
            }
        }
        std::size_t turns = 1;
        for (const auto& bank : words) turns = std::max(turns, bank.size());
        tally->conflicts += static_cast<long>(turns) - 1;
    }
}

void count_global(const std::vector<Entry>& lanes, Counts* counts) {
    std::set<std::uintptr_t> segments;
    std::set<std::uintptr_t> words;
    for (const Entry& entry : lanes) {
        for (std::uintptr_t b = entry.address / kSegment; b <= (entry.address + entry.bytes - 1) / kSegment; ++b) {
            segments.insert(b);
        }
        for (std::uintptr_t w = entry.address / 4; w <= (entry.address + entry.bytes - 1) / 4; ++w) words.insert(w);
    }
    counts->global_accesses += 1;
    counts->segments += static_cast<long>(segments.size());
    counts->least_segments += static_cast<long>((words.size() * 4 + kSegment - 1) / kSegment);
}

void count_wave(const std::vector<Entry>* lanes, std::size_t count, Counts* counts) {
    // What the lanes did at one place for the n-th time belongs together.
    std::map<std::tuple<const void*, bool, long>, std::vector<Entry>> accesses;
    for (std::size_t lane = 0; lane < count; ++lane) {
        std::map<const void*, long> times;
        for (const Entry& entry : lanes[lane]) {
            auto& together = accesses[{entry.caller, entry.shared, times[entry.caller]++}];
            together.push_back(entry);
            together.back().lane = lane;
        }
    }
    for (const auto& [place, entries] : accesses) {
        if (entries[0].shared) {
            count_shared(entries, entries[0].write ? &counts->shared_writes : &counts->shared_reads);
        } else {
            count_global(entries, counts);
        }
    }
}

}  // namespace

void count(bool on) {
    counting = on;
    counts_of.clear();
    logs.clear();
}

namespace {
bool counted(const Block& block) {
    return counting &&
           (block.number == 0 || block.number + 1 == now.launch->grid[0] * now.launch->grid[1] * now.launch->grid[2]);
}
}  // namespace

void record(const void* address, std::size_t bytes, bool write, bool shared, const void* caller) {
    if (!counting || !counted(*current->block)) return;
    auto& log = logs[current->block][current->index];
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (!log.empty()) {
        Entry& before = log.back();
        if (before.address + before.bytes == at && before.address / 16 == (at + bytes - 1) / 16 &&
            before.write == write && before.shared == shared) {
            before.bytes += bytes;
            return;
        }
    }
    log.push_back({caller, at, bytes, write, shared});
}

void block_begins(Block& block) {
    if (counted(block)) logs[&block].assign(block.threads.size(), {});
}

void block_ends(Block& block) {
    if (!counted(block)) return;
    const auto& threads = logs[&block];
    const auto lanes = static_cast<std::size_t>(now.card->lanes);
    for (std::size_t first = 0; first < threads.size(); first += lanes) {
        count_wave(&threads[first], std::min(lanes, threads.size() - first), &counts_of[now.launch->kernel]);
    }
}

std::map<std::string, Counts> by_kernel() {
    std::map<std::string, Counts> named;
    for (const auto& [kernel, counts] : counts_of) named[function_name(kernel)] = counts;
    return named;
}

std::string table() {
    std::ostringstream out;
    out << std::left << std::setw(46) << "kernel" << "shared reads, conflicts   writes, conflicts   global accesses, "
        << "segments, at least\n";
    for (const auto& [name, c] : by_kernel()) {
        out << std::left << std::setw(46) << name << std::right << std::setw(12) << c.shared_reads.accesses
            << std::setw(11) << c.shared_reads.conflicts << std::setw(9) << c.shared_writes.accesses << std::setw(11)
            << c.shared_writes.conflicts << std::setw(18) << c.global_accesses << std::setw(10) << c.segments
            << std::setw(10) << c.least_segments << '\n';
    }
    return out.str();
}

}  // namespace strata::sim::traffic
