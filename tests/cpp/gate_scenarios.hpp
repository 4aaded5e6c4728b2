// Scenarios of the gate on simulated cards. Each runs in a process of its own, since the environment is read once and a
// lost device ends the process; what it finds it tells its parent.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/backend.hpp"
#include "common/fused_gr_policy.hpp"
#include "cpu/read.hpp"
#include "gpu/faults.hpp"
#include "gpu/vendor.hpp"
#include "selftest_answers.hpp"
#include "sim/runtime.hpp"

// csrc/gpu/device.cu's table, under the name that csrc/sim/device.cpp gives it.
extern "C" const strata::Backend* strata_kernels_backend();

namespace strata::test {

inline int failures = 0;

inline void expect(bool holds, const std::string& scenario, const std::string& what) {
    if (holds) return;
    ++failures;
    std::printf("FAILED %s: %s\n", scenario.c_str(), what.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// A scenario in a child process: it prints "key=value" lines into a pipe, and ends.

struct Outcome {
    int status = -1;  // exit status; 1000 + signal where it was killed
    std::multimap<std::string, std::string> said;

    std::string at(const std::string& key) const {
        const auto found = said.find(key);
        return found == said.end() ? "" : found->second;
    }
    std::vector<std::string> all(const std::string& key) const {
        std::vector<std::string> values;
        for (auto [it, end] = said.equal_range(key); it != end; ++it) values.push_back(it->second);
        return values;
    }
};

inline int out_pipe = -1;

__attribute__((format(printf, 1, 2))) inline void say(const char* format, ...) {
    char line[2048];
    va_list values;
    va_start(values, format);
    const int length = std::vsnprintf(line, sizeof line, format, values);
    va_end(values);
    if (write(out_pipe, line, static_cast<std::size_t>(length)) != length || write(out_pipe, "\n", 1) != 1) _exit(9);
}

using Environment = std::map<std::string, std::string>;

inline Outcome run(const Environment& environment, const std::function<void()>& body) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        out_pipe = ends[1];
        for (const char* name : {"STRATA_HC_SPLIT", "STRATA_SELFTEST", "STRATA_QFUSE_HC", "HSA_OVERRIDE_GFX_VERSION"}) {
            unsetenv(name);
        }
        for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
        // What the library says on standard error on its way out is part of the outcome.
        dup2(ends[1], STDERR_FILENO);
        std::atexit([] { say("destructors=ran"); });
        body();
        std::exit(0);
    }
    close(ends[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<std::size_t>(n));
    close(ends[0]);
    Outcome outcome;
    int status = 0;
    waitpid(child, &status, 0);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = text.find('\n', begin);
        const std::string line = text.substr(begin, end - begin);
        const std::size_t equals = line.find('=');
        if (line.rfind("strata_ops: ", 0) == 0) {
            outcome.said.emplace("stderr", line);
        } else if (equals != std::string::npos) {
            outcome.said.emplace(line.substr(0, equals), line.substr(equals + 1));
        }
        if (end == std::string::npos) break;
        begin = end + 1;
    }
    return outcome;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a child does

inline const Backend& backend() { return *strata_kernels_backend(); }

// The CPU as the self-test asks it where plain differs.
inline const Backend* cpu_witness() {
    static const Backend backend = [] {
        Backend made{};
        made.abi = kBackendAbi;
        made.name = "cpu";
        made.scratch_size = [](const Geometry* g, std::int64_t tokens) { return cpu::scratch_size(*g, tokens); };
        made.read = [](const ReadArgs* args, const ReadChoice*, int, void*, Report* report) {
            const auto here = [](std::int64_t begin, std::int64_t end, std::int64_t,
                                 void (*body)(std::int64_t, std::int64_t, void*),
                                 void* context) { body(begin, end, context); };
            return cpu::read(*args, nullptr, here, report);
        };
        return made;
    }();
    return &backend;
}

inline int open_card(const std::string& card, std::uint64_t seed = 1) {
    std::string problem;
    const int device = sim::open_card(card.c_str(), seed, &problem);
    if (device < 0) {
        say("problem=%s", problem.c_str());
        std::exit(8);
    }
    backend().set_witness(cpu_witness());
    backend().set_log([](LogLevel level, const char* line) { say("log=%d %s", static_cast<int>(level), line); });
    return device;
}

// Runs the check and tells everything about it.
inline bool check_and_tell(int device) {
    struct Seen {
        int lines = 0, unequal = 0, candidate = 0;
    } seen;
    Report report;
    const bool completed = backend().check(
        device,
        [](const CheckLine* line, void* context) {
            auto& s = *static_cast<Seen*>(context);
            ++s.lines;
            s.candidate += std::strcmp(line->variant, "p4") == 0;
            if (line->equal) return;
            if (s.unequal++ > 0) return;
            say("first=%s/%d against %s: %s word %lld %08x %08x", line->variant, line->q8_columns, line->against,
                line->output, static_cast<long long>(line->index), line->expected, line->got);
        },
        &seen, &report);
    say("completed=%d", completed);
    say("report=%s", report.text);
    say("lines=%d", seen.lines);
    say("unequal=%d", seen.unequal);
    say("candidate_lines=%d", seen.candidate);
    return completed;
}

inline void tell_state(int device) {
    DeviceFacts facts{};
    Report report;
    if (!backend().describe(device, &facts, &report)) {
        say("describe=%s", report.text);
        return;
    }
    const Gates& g = facts.gates;
    say("state=%d", static_cast<int>(g.state));
    say("gates=plain%d split%d staged%d wide%d runtime%d tiled%d p4%d", g.plain, g.split, g.staged, g.wide_up,
        g.runtime_geometry, g.tiled, g.p4);
    say("want=%s", facts.want);
    say("chosen=%s", facts.chosen);
    say("why=%s", facts.why);
    say("tiled_reads=%ld", gpu::planted_fault().reads[kHcTiled].load());
    say("tiled_few_reads=%ld", gpu::planted_fault().reads[kHcTiledFew].load());
    say("p4_reads=%ld", gpu::planted_fault().reads[kHcRegisterHalf].load());
    say("allocations=%ld", sim::live_allocations());
    say("streams=%ld", sim::live_streams());
}

// A read of zeros as the op makes it, without a write and a next one, in memory that the device knows.
class ZeroRead {
  public:
    ZeroRead(const Geometry& geometry, std::int64_t tokens)
        : geometry_(geometry),
          tokens_(tokens),
          scratch_bytes_(backend().scratch_size(&geometry, tokens)),
          residual_(tokens * geometry.depth()),
          w_norm_(geometry.depth()),
          mixed_(tokens * geometry.width),
          lo_(tokens * geometry.rank),
          rs_(tokens * geometry.streams),
          w_down_(geometry.rank * geometry.depth()),
          w_up_(geometry.rank * geometry.depth()),
          scratch_(scratch_bytes_) {}

    bool queue(int device, Report* report, gpu::Stream stream = nullptr) {
        const std::int64_t depth = geometry_.depth();
        const auto lend = [&](const char* name, auto& buffer, std::int64_t count, bool writable) {
            const std::size_t bytes = static_cast<std::size_t>(count) * sizeof *buffer.data();
            sim::declare(device, name, buffer.data(), bytes, writable, true);
        };
        lend("residual", residual_, tokens_ * depth, false);
        lend("w_norm", w_norm_, depth, false);
        lend("w_down", w_down_, geometry_.rank * depth, false);
        lend("w_up", w_up_, geometry_.rank * depth, false);
        lend("mixed", mixed_, tokens_ * geometry_.width, true);
        lend("lo", lo_, tokens_ * geometry_.rank, true);
        lend("rs", rs_, tokens_ * geometry_.streams, true);
        lend("scratch", scratch_, scratch_bytes_, true);
        ReadArgs args{};
        args.geometry = geometry_;
        args.tokens = tokens_;
        args.eps = 1e-6f;
        args.residual = residual_.data();
        args.w_norm = w_norm_.data();
        args.w_down = w_down_.data();
        args.w_up = w_up_.data();
        args.mixed = mixed_.data();
        args.lo = lo_.data();
        args.rs = rs_.data();
        args.scratch = scratch_.data();
        const ReadChoice choice;
        return backend().read(&args, &choice, device, stream, report);
    }

  private:
    Geometry geometry_;
    std::int64_t tokens_, scratch_bytes_;
    Buffer<float> residual_, w_norm_, mixed_, lo_, rs_;
    Buffer<std::uint16_t> w_down_, w_up_;
    Buffer<unsigned char> scratch_;
};

// Of one token at a small geometry. Its memory is never freed: what was captured or queued outlives the call.
inline bool small_read(int device, Report* report, gpu::Stream stream = nullptr) {
    static ZeroRead& read = *new ZeroRead({32, 1, 8}, 1);
    return read.queue(device, report, stream);
}

}  // namespace strata::test
