// The promotion gate, end to end on simulated cards: what is chosen and said, which planted faults are caught, and how
// each runtime error ends. Every scenario runs in a process of its own, since the environment is read once and a lost
// device ends the process.
//
//   sim_gate choices | full [stride] | faults | errors | once      one part, for CTest to run them side by side
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "common/backend.hpp"
#include "common/launch_plan.hpp"
#include "common/selftest_cases.hpp"
#include "gpu/faults.hpp"
#include "sim/runtime.hpp"

// csrc/gpu/device.cu's table, under the name that csrc/sim/device.cpp gives it.
extern "C" const strata::Backend* strata_kernels_backend();

using namespace strata;
using gpu::Fault;

namespace {

int failures = 0;

void expect(bool holds, const std::string& scenario, const std::string& what) {
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

int out_pipe = -1;

__attribute__((format(printf, 1, 2))) void say(const char* format, ...) {
    char line[2048];
    va_list values;
    va_start(values, format);
    const int length = std::vsnprintf(line, sizeof line, format, values);
    va_end(values);
    if (write(out_pipe, line, static_cast<std::size_t>(length)) != length || write(out_pipe, "\n", 1) != 1) _exit(9);
}

using Environment = std::map<std::string, std::string>;

Outcome run(const Environment& environment, const std::function<void()>& body) {
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

const Backend& backend() { return *strata_kernels_backend(); }

int open_card(const std::string& card, std::uint64_t seed = 1) {
    std::string problem;
    const int device = sim::open_card(card.c_str(), seed, &problem);
    if (device < 0) {
        say("problem=%s", problem.c_str());
        std::exit(8);
    }
    backend().set_log([](LogLevel level, const char* line) { say("log=%d %s", static_cast<int>(level), line); });
    return device;
}

// Runs the check and tells everything about it.
bool check_and_tell(int device) {
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

void tell_state(int device) {
    DeviceFacts facts{};
    Report report;
    if (!backend().describe(device, &facts, &report)) {
        say("describe=%s", report.text);
        return;
    }
    const Gates& g = facts.gates;
    say("state=%d", static_cast<int>(g.state));
    say("gates=plain%d split%d staged%d wide%d runtime%d p4%d", g.plain, g.split, g.staged, g.wide_up,
        g.runtime_geometry, g.p4);
    say("want=%s", facts.want);
    say("chosen=%s", facts.chosen);
    say("why=%s", facts.why);
    say("p4_reads=%ld", gpu::planted_fault().reads[kHcRegisterHalf]);
    say("allocations=%ld", sim::live_allocations());
    say("streams=%ld", sim::live_streams());
}

// An ordinary read of one token at a small geometry, as the op makes it.
bool small_read(int device, Report* report, gpu::Stream stream = nullptr) {
    alignas(16) static float residual[32], w_norm[32], mixed[32], lo[8], rs[4];
    alignas(16) static std::uint16_t w_down[8 * 32], w_up[32 * 8];
    alignas(16) static unsigned char scratch[4096];
    ReadArgs args{};
    args.geometry = {32, 1, 8};
    args.tokens = 1;
    args.eps = 1e-6f;
    args.residual = residual;
    args.w_norm = w_norm;
    args.w_down = w_down;
    args.w_up = w_up;
    args.mixed = mixed;
    args.lo = lo;
    args.rs = rs;
    args.scratch = scratch;
    for (const auto& [name, pointer, bytes, writable] :
         {std::tuple<const char*, const void*, std::size_t, bool>{"residual", residual, sizeof residual, false},
          {"w_norm", w_norm, sizeof w_norm, false},
          {"w_down", w_down, sizeof w_down, false},
          {"w_up", w_up, sizeof w_up, false},
          {"mixed", mixed, sizeof mixed, true},
          {"lo", lo, sizeof lo, true},
          {"rs", rs, sizeof rs, true},
          {"scratch", scratch, sizeof scratch, true}}) {
        sim::declare(device, name, pointer, bytes, writable, true);
    }
    const ReadChoice choice;
    return backend().read(&args, &choice, device, stream, report);
}

// ---------------------------------------------------------------------------------------------------------------------
// Choices

struct Choice {
    const char* card;
    const char* value;  // of STRATA_HC_SPLIT; null: unset
    const char* chosen;
    bool candidate;    // P4 was launched in the self-test
    const char* line;  // a line with this text and level was said; null: none of ours at all
    int level;
};

constexpr int kInfo = 0, kWarning = 1;

constexpr const char* kOptIn = "P4 is opt-in through STRATA_HC_SPLIT=7";
constexpr const char* kRestricted = "P4 is restricted to gfx1200 and gfx1201";
constexpr const char* kPassed = "P4 passed bitwise parity with staged and is selected";
constexpr const char* kNoVariant = "names no variant";

constexpr Choice kChoices[] = {
    {"gfx1200", nullptr, "staged", false, kOptIn, kInfo},
    {"gfx1200", "0", "plain", false, kOptIn, kInfo},
    {"gfx1200", "1", "split", false, kOptIn, kInfo},
    {"gfx1200", "2", "staged", false, kOptIn, kInfo},
    {"gfx1200", "7", "p4", true, kPassed, kInfo},
    {"gfx1201", nullptr, "staged", false, kOptIn, kInfo},
    {"gfx1201", "0", "plain", false, kOptIn, kInfo},
    {"gfx1201", "1", "split", false, kOptIn, kInfo},
    {"gfx1201", "2", "staged", false, kOptIn, kInfo},
    {"gfx1201", "7", "p4", true, kPassed, kInfo},
    {"gfx1201", "70", "staged", false, kNoVariant, kWarning},
    {"gfx1201", "", "staged", false, kNoVariant, kWarning},
    {"gfx1201", "p4", "staged", false, kNoVariant, kWarning},
    {"gfx1100", nullptr, "staged", false, nullptr, 0},
    {"gfx1100", "0", "plain", false, nullptr, 0},
    {"gfx1100", "1", "split", false, nullptr, 0},
    {"gfx1100", "2", "staged", false, nullptr, 0},
    {"gfx1100", "7", "staged", false, kRestricted, kWarning},
    {"gfx942", nullptr, "staged", false, nullptr, 0},
    {"gfx942", "7", "staged", false, kRestricted, kWarning},
    {"gfx90a", "7", "staged", false, kRestricted, kWarning},
    {"sm_75", "7", "staged", false, kRestricted, kWarning},
    {"sm_90", nullptr, "staged", false, nullptr, 0},
    {"sm_90", "0", "plain", false, nullptr, 0},
    {"sm_90", "1", "split", false, nullptr, 0},
    {"sm_90", "7", "staged", false, kRestricted, kWarning},
    {"sm_90", "x", "staged", false, kNoVariant, kWarning},
    {"sm_120", "7", "staged", false, kRestricted, kWarning},
};

// docs/variants.md says the same.
void test_documented() {
    std::string page;
    if (std::FILE* file = std::fopen(STRATA_SOURCE_DIR "/docs/variants.md", "r")) {
        char buffer[4096];
        for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) page.append(buffer, n);
        std::fclose(file);
    }
    constexpr const char* kLevels[] = {"info", "warning"};
    for (const Choice& c : kChoices) {
        const std::string value = c.value == nullptr ? "unset" : c.value[0] == '\0' ? "(empty)" : c.value;
        std::string row = std::string("| ") + c.card + " | " + value + " | " + c.chosen + " |";
        row += c.line == nullptr ? " | |" : std::string(" ") + kLevels[c.level] + " | " + c.line + " |";
        expect(page.find(row + "\n") != std::string::npos, "docs/variants.md", "lacks the row " + row);
    }
}

void test_choices() {
    test_documented();
    for (const Choice& c : kChoices) {
        const std::string scenario = std::string(c.card) + " " + (c.value == nullptr ? "unset" : c.value);
        Environment environment;
        if (c.value != nullptr) environment["STRATA_HC_SPLIT"] = c.value;
        const Outcome o = run(environment, [&] {
            gpu::planted_fault().case_stride = kSelftestCases;  // the rules are what is looked at here
            const int device = open_card(c.card);
            tell_state(device);  // before the check
            check_and_tell(device);
            tell_state(device);
        });
        expect(o.status == 0, scenario, "status " + std::to_string(o.status));
        const auto chosen = o.all("chosen");
        const bool seven = c.value != nullptr && std::strcmp(c.value, "7") == 0;
        expect(chosen.size() == 2 && chosen[0] == (seven ? "staged" : c.chosen), scenario,
               "before the check a request is capped at staged, but " + (chosen.empty() ? "nothing" : chosen[0]) +
                   " runs");
        expect(chosen.size() == 2 && chosen[1] == c.chosen, scenario, "chose " + (chosen.empty() ? "" : chosen.back()));
        expect(o.all("p4_reads").back() == (c.candidate ? "1" : "0"), scenario, "P4 reads " + o.all("p4_reads").back());
        expect(o.at("completed") == "1" && o.at("unequal") == "0", scenario, "not all equal: " + o.at("first"));
        const auto lines = o.all("log");
        if (c.line == nullptr) {
            expect(lines.empty(), scenario, "said: " + (lines.empty() ? "" : lines[0]));
        } else {
            int with_text = 0;
            for (const std::string& line : lines) {
                if (line.find(c.line) == std::string::npos) continue;
                ++with_text;
                expect(line[0] == '0' + c.level, scenario, "level of: " + line);
            }
            expect(with_text == 1, scenario, "said " + std::to_string(with_text) + " times: " + c.line);
        }
        for (const std::string& line : lines) {
            expect(line.find(kParityMarker) == std::string::npos, scenario, "the marker without STRATA_QFUSE_HC=1");
        }
    }

    // An override says that the name may not be true: allowed, through the gates, with one warning.
    const Outcome o =
        run({{"STRATA_HC_SPLIT", "7"}, {"HSA_OVERRIDE_GFX_VERSION", "12.0.1"}, {"STRATA_QFUSE_HC", "1"}}, [] {
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            check_and_tell(device);
            tell_state(device);
        });
    int warnings = 0, markers = 0;
    for (const std::string& line : o.all("log")) {
        warnings += line.find("HSA_OVERRIDE_GFX_VERSION is set") != std::string::npos && line[0] == '1';
        markers += line == std::string("0 ") + kParityMarker;
    }
    expect(o.at("chosen") == "p4" && warnings == 1, "override", "one warning and P4");
    expect(markers == 1, "marker", "with STRATA_QFUSE_HC=1 and all gates it is said once");
}

// The self-test at work, where both gates and both wave widths are: every `stride`-th case, since a simulated card
// needs seconds for each (`sim_gate full 1` runs all of them, some minutes).
void test_full(int stride) {
    for (const char* card : {"gfx1201", "gfx942"}) {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}, {"STRATA_QFUSE_HC", "1"}}, [&] {
            gpu::planted_fault().case_stride = stride;
            const int device = open_card(card, 7);
            check_and_tell(device);
            tell_state(device);
        });
        const bool gfx12 = std::strcmp(card, "gfx1201") == 0;
        expect(o.at("completed") == "1" && o.at("unequal") == "0", card,
               "all equal; " + o.at("first") + o.at("report"));
        expect(o.at("chosen") == (gfx12 ? "p4" : "staged"), card, "chose " + o.at("chosen"));
        // plain, split, staged and the run-time geometry in every case; the wide up kernel twice where q8_1 is on.
        int lines = 0;
        for (int i = 0; i < kSelftestCases; i += stride) {
            const bool q8_1 = selftest_case(i).q8_1;
            lines += 4 + (q8_1 ? 2 : 0) + (gfx12 ? 1 : 0) + (gfx12 && q8_1 ? 1 : 0);
        }
        expect(o.at("lines") == std::to_string(lines), card, "comparisons: " + o.at("lines"));
        expect(o.at("allocations") == "0" && o.at("streams") == "0", card, "something was left behind");
        std::printf("full self-test on %s: %s comparisons, %s runs\n", card, o.at("lines").c_str(),
                    o.at("chosen").c_str());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Planted faults

constexpr unsigned kP4 = 1u << kHcRegisterHalf;
constexpr unsigned kStaged = 1u << kHcStaged;
constexpr unsigned kSplit = 1u << kHcSplit;
constexpr unsigned kEverything = kP4 | kStaged | kSplit | 1u << kHcPlain;

struct PlantedFault {
    const char* name;
    Fault fault;
    unsigned variants;
    int output;
    const char* card;
    const char* chosen;  // with STRATA_HC_SPLIT=7
    const char* caught;  // by which comparison: the variant that is found unequal first
};

constexpr PlantedFault kFaults[] = {
    {"P4: wrong swizzle", Fault::kWrongSwizzle, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: tile 2's half A not loaded before the loop", Fault::kHalfANotLoaded, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: idle groups of the inject block skip half B", Fault::kIdleSkipHalfB, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: one token's tile skipped", Fault::kTokenSkipped, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: half B from the wrong tile", Fault::kHalfBWrongTile, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: missing barrier", Fault::kMissingBarrier, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: 32-bit mask on a 64-lane wave", Fault::kNarrowMask, kP4, 0, "gfx1201:wide,64,65536,64", "staged", "p4"},
    {"P4: stale q8_1 counter", Fault::kStaleCounter, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in mixed", Fault::kFlippedBit, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in inject", Fault::kFlippedBit, kP4, 1, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in residual_out", Fault::kFlippedBit, kP4, 2, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in lo", Fault::kFlippedBit, kP4, 3, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in rs", Fault::kFlippedBit, kP4, 4, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in q8_1", Fault::kFlippedBit, kP4, 5, "gfx1201", "staged", "p4"},
    {"P4 writes nothing", Fault::kWritesNothing, kP4, 0, "gfx1201", "staged", "p4"},
    {"staged and P4 write nothing", Fault::kWritesNothing, kP4 | kStaged, 0, "gfx1201", "split", "staged"},
    {"nothing writes anything", Fault::kWritesNothing, kEverything, 0, "gfx1201", "plain", "plain"},
    {"the same wrong arithmetic everywhere", Fault::kWrongArithmetic, kEverything, 0, "gfx1201", "plain", "plain"},
    {"bf16 streams cut off by split", Fault::kCutStream, kSplit, 0, "gfx1201", "p4", "split"},
    {"bf16 streams cut off everywhere", Fault::kCutStream, kEverything, 0, "gfx1201", "plain", "plain"},
    {"staged wrong, P4 right", Fault::kFlippedBit, kStaged, 0, "gfx1201", "split", "staged"},
    {"staged and P4 equally wrong", Fault::kFlippedBit, kStaged | kP4, 0, "gfx1201", "split", "staged"},
    {"split alone wrong", Fault::kFlippedBit, kSplit, 3, "gfx1201", "p4", "split"},
    {"split and staged wrong", Fault::kFlippedBit, kSplit | kStaged, 3, "gfx1201", "plain", "split"},
};

void test_faults() {
    for (const PlantedFault& f : kFaults) {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [&] {
            gpu::planted_fault().fault = f.fault;
            gpu::planted_fault().variants = f.variants;
            gpu::planted_fault().output = f.output;
            gpu::planted_fault().case_stride = kSelftestCases - 1;  // T = 1 without options, T = 8 with all and bf16
            const int device = open_card(f.card, 3);
            check_and_tell(device);
            tell_state(device);
            Report report;
            say("read=%d", small_read(device, &report));
            say("read_says=%s", report.text);
        });
        // A fault that the card itself refuses (a shuffle with lanes missing) may lose the device instead.
        const std::string by = o.at("first").substr(0, o.at("first").find('/'));
        const bool lost = o.status == 1;
        expect(lost || (o.at("unequal") != "0" && by == f.caught), f.name, "caught by '" + o.at("first") + "'");
        expect(lost || o.at("chosen") == f.chosen, f.name, "chose " + o.at("chosen"));
        const bool plain_wrong = std::strcmp(f.caught, "plain") == 0;
        expect(lost || o.at("read") == (plain_wrong ? "0" : "1"), f.name,
               plain_wrong ? "the op raises" : "the op runs: " + o.at("read_says"));
        if (plain_wrong) {
            expect(o.at("read_says").find("does not compute what the CPU does") != std::string::npos, f.name,
                   o.at("read_says"));
        }
        std::printf("%-52s %s, %s runs\n", f.name, lost ? "process ended" : ("caught by " + o.at("first")).c_str(),
                    plain_wrong ? "nothing" : o.at("chosen").c_str());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Errors at every call of the self-test, and at the op's own launch: one code of each class, and every code there is at
// the calls that a check makes first (a check to its end takes a simulated card a second).

enum class Verdict { CandidateOnly, NotCompleted, Exit, Raises };

// Which call of its kind in a check of one case (T = 1, no options): see Selftest::open, run_case and close.
struct Site {
    const char* name;
    sim::Call call;
    int nth;
    Verdict ordinary;
    bool every_code = false;
};

constexpr Site kSites[] = {
    {"allocating", sim::Call::Malloc, 1, Verdict::NotCompleted, true},
    {"creating the reference stream", sim::Call::StreamCreate, 1, Verdict::NotCompleted, true},
    {"creating the candidate's stream", sim::Call::StreamCreate, 2, Verdict::CandidateOnly},
    {"making an input", sim::Call::Launch, 1, Verdict::NotCompleted},
    {"waiting for the inputs", sim::Call::StreamSync, 1, Verdict::NotCompleted},
    {"poisoning plain's outputs", sim::Call::Memset, 1, Verdict::NotCompleted},
    {"launching plain", sim::Call::Launch, 10, Verdict::NotCompleted},
    {"reading plain back", sim::Call::Memcpy, 1, Verdict::NotCompleted},
    {"waiting for plain", sim::Call::StreamSync, 2, Verdict::NotCompleted},
    {"poisoning P4's outputs", sim::Call::Memset, 5, Verdict::CandidateOnly},
    {"launching P4", sim::Call::Launch, 22, Verdict::CandidateOnly},
    {"reading P4 back", sim::Call::Memcpy, 5, Verdict::CandidateOnly},
    {"waiting for P4", sim::Call::StreamSync, 6, Verdict::CandidateOnly},
    {"the candidate's last synchronisation", sim::Call::StreamSync, 7, Verdict::CandidateOnly},
    {"destroying the candidate's stream", sim::Call::StreamDestroy, 1, Verdict::CandidateOnly},
    {"the reference's last synchronisation", sim::Call::StreamSync, 8, Verdict::NotCompleted},
    {"destroying the reference stream", sim::Call::StreamDestroy, 2, Verdict::NotCompleted},
    {"freeing", sim::Call::Free, 1, Verdict::NotCompleted},
};

void test_errors() {
    std::vector<int> codes;
    for (const GrErrorRow& row : kGrErrors) {
        if (row.code != 0) codes.push_back(row.code);
    }
    codes.push_back(4242);  // a code on no list

    std::map<std::string, std::map<std::string, int>> table;
    const std::vector<int> classes = {2, 700, 999, 4242};
    for (const Site& site : kSites) {
        for (const int code : site.every_code ? codes : classes) {
            const bool fatal = fused_gr_context_fatal(code, GrBackend::Hip);
            const Verdict expected = fatal ? Verdict::Exit : site.ordinary;
            const std::string scenario = std::string(site.name) + " gives " + std::to_string(code);
            const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [&] {
                gpu::planted_fault().case_stride = kSelftestCases;
                const int device = open_card("gfx1201");
                tell_state(device);
                sim::plant(site.call, site.nth, code);
                check_and_tell(device);
                sim::plant(site.call, 0, 0);
                tell_state(device);
                Report report;
                say("read=%d %s", small_read(device, &report), report.text);
                if (expected == Verdict::NotCompleted && code == 2) {  // and it may be tried again
                    check_and_tell(device);
                    tell_state(device);
                }
            });
            if (expected == Verdict::Exit) {
                const auto errors = o.all("stderr");
                expect(o.status == 1, scenario, "ends the process with 1, but: " + std::to_string(o.status));
                expect(o.at("destructors").empty(), scenario, "destructors ran");
                expect(errors.size() == 1 && errors[0].find("(" + std::to_string(code) + ")") != std::string::npos &&
                           errors[0].find("fatal") != std::string::npos,
                       scenario, "one line with the code: " + (errors.empty() ? "none" : errors[0]));
                ++table[site.name]["exit"];
                continue;
            }
            expect(o.status == 0, scenario, "status " + std::to_string(o.status));
            expect(o.at("read").substr(0, 1) == "1", scenario, "reads go on: " + o.at("read"));
            const auto chosen = o.all("chosen");
            const auto states = o.all("state");
            if (expected == Verdict::CandidateOnly) {
                expect(o.at("completed") == "1" && chosen.back() == "staged", scenario,
                       "staged runs, but: " + chosen.back() + " " + o.at("report"));
                expect(o.all("gates").back().find("split1 staged1") != std::string::npos, scenario,
                       o.all("gates").back());
                ++table[site.name]["candidate only"];
            } else {
                const auto completed = o.all("completed");
                expect(completed[0] == "0" && chosen[1] == "staged", scenario, "not completed, and staged runs");
                if (code == 2) {
                    expect(completed.size() == 2 && completed[1] == "1" && chosen.back() == "p4", scenario,
                           "P4 after a check that completes");
                }
                ++table[site.name]["whole check"];
            }
            // What could be given back was; a destroy or free that failed is the one thing that cannot.
            const bool gave_up = site.call == sim::Call::Free || site.call == sim::Call::StreamDestroy;
            expect(gave_up || (o.all("allocations").back() == "0" && o.all("streams").back() == "0"), scenario,
                   "left behind: " + o.all("allocations").back() + " allocations, " + o.all("streams").back() +
                       " streams");
        }
    }
    std::printf("\n%-42s %14s %12s %5s\n", "a code at", "candidate only", "whole check", "exit");
    for (const Site& site : kSites) {
        auto& row = table[site.name];
        std::printf("%-42s %14d %12d %5d\n", site.name, row["candidate only"], row["whole check"], row["exit"]);
    }

    // An op launch that fails raises, names the kernel and the code, and leaves no error for others to find.
    for (const int code : codes) {
        const Outcome o = run({{"STRATA_SELFTEST", "0"}}, [&] {
            const int device = open_card("gfx1201");
            Report report;
            tell_state(device);
            sim::plant(sim::Call::Launch, 1, code);
            say("read=%d %s", small_read(device, &report), report.text);
            say("pending=%d", sim::pending_error());
        });
        const bool fatal = fused_gr_context_fatal(code, GrBackend::Hip);
        const std::string scenario = "an op's launch gives " + std::to_string(code);
        expect(o.status == 0 && o.at("read").substr(0, 1) == "0", scenario, "raises: " + o.at("read"));
        expect(o.at("read").find("gr_norm_runtime_kernel") != std::string::npos &&
                   o.at("read").find("(" + std::to_string(code) + ")") != std::string::npos,
               scenario, o.at("read"));
        expect(fatal || o.at("pending") == "0", scenario, "left pending: " + o.at("pending"));
    }

    // Another library's pending error is neither eaten nor blamed on us.
    for (const int code : {1, 98, 700, 719}) {
        const Outcome o = run({{"STRATA_SELFTEST", "0"}}, [&] {
            const int device = open_card("gfx1201");
            Report report;
            tell_state(device);
            sim::set_pending(code);
            say("read=%d %s", small_read(device, &report), report.text);
            say("pending=%d", sim::pending_error());
        });
        const bool fatal = fused_gr_context_fatal(code, GrBackend::Hip);
        const std::string scenario = "pending before: " + std::to_string(code);
        expect(o.at("pending") == std::to_string(code), scenario, "it is still there, but: " + o.at("pending"));
        expect(o.at("read").substr(0, 1) == (fatal ? "0" : "1"), scenario, o.at("read"));
        expect(!fatal || o.at("read").find("not of strata_ops") != std::string::npos, scenario, o.at("read"));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// When: once, under many threads, never in a capture, not at all on request.

void test_once() {
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            std::vector<std::thread> threads;
            std::atomic<int> good{0};
            for (int i = 0; i < 16; ++i) {
                threads.emplace_back([&] {
                    DeviceFacts facts{};
                    Report report;
                    good += backend().describe(device, &facts, &report);
                });
            }
            for (std::thread& t : threads) t.join();
            Report report;
            say("read=%d %s", small_read(device, &report), report.text);
            say("read=%d %s", small_read(device, &report), report.text);
            say("good=%d", good.load());
            tell_state(device);
        });
        expect(o.at("good") == "16" && o.at("read").substr(0, 1) == "1", "first read", o.at("read"));
        expect(o.at("p4_reads") == "1" && o.at("chosen") == "p4", "first read",
               "the check ran once: " + o.at("p4_reads"));
    }
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            gpu::Stream stream{};
            Report report;
            say("created=%d", sim::stream_create(&stream));
            say("begun=%d", sim::begin_capture(stream, sim::CaptureMode::Global));
            say("read=%d %s", small_read(device, &report, stream), report.text);
            tell_state(device);
            std::size_t launches = 0;
            say("ended=%d", sim::end_capture(stream, &launches));
            say("captured=%zu", launches);
            say("read=%d %s", small_read(device, &report), report.text);
            tell_state(device);
        });
        const auto chosen = o.all("chosen");
        expect(o.at("ended") == "0" && o.at("captured") == "3", "capture", "three launches: " + o.at("captured"));
        expect(chosen.size() == 2 && chosen[0] == "staged" && chosen[1] == "p4", "capture",
               "no check while capturing; it runs at the next read");
    }
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {  // another stream's capture is not disturbed
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            gpu::Stream stream{};
            sim::stream_create(&stream);
            sim::begin_capture(stream, sim::CaptureMode::Global);
            std::thread other([&] {
                sim::set_device(device);
                check_and_tell(device);
            });
            other.join();
            std::size_t launches = 0;
            say("ended=%d", sim::end_capture(stream, &launches));
            tell_state(device);
        });
        expect(o.at("completed") == "1" && o.at("ended") == "0" && o.at("chosen") == "p4", "a check beside a capture",
               o.at("report"));
    }
    for (const char* value : {"7", "2", "0"}) {
        const Outcome o = run({{"STRATA_HC_SPLIT", value}, {"STRATA_SELFTEST", "0"}}, [] {
            const int device = open_card("gfx1201");
            Report report;
            say("read=%d %s", small_read(device, &report), report.text);
            check_and_tell(device);
            tell_state(device);
        });
        const std::string scenario = std::string("STRATA_SELFTEST=0 with ") + value;
        const bool seven = value[0] == '7';
        expect(o.at("read").substr(0, 1) == "1" && o.at("p4_reads") == "0", scenario, "no P4: " + o.at("p4_reads"));
        expect(o.at("chosen") == (seven || value[0] == '2' ? "staged" : "plain"), scenario, o.at("chosen"));
        expect(o.at("state") == "1" && o.at("completed") == "0", scenario, "skipped, and a check says so");
        const auto lines = o.all("log");
        expect(lines.size() == 1 && lines[0][0] == (seven ? '1' : '0'), scenario, "says so once");
    }
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {  // many devices
            gpu::planted_fault().case_stride = kSelftestCases;
            int device = 0;
            for (int i = 0; i < 70; ++i) device = open_card("gfx1201");
            check_and_tell(device);
            say("device=%d", device);
            tell_state(device);
        });
        expect(o.at("device") == "69" && o.at("chosen") == "p4", "device 69", o.at("chosen") + o.at("report"));
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string part = argc >= 2 ? argv[1] : "";
    if (part == "choices") {
        test_choices();
    } else if (part == "full") {
        test_full(argc == 3 ? std::atoi(argv[2]) : 7);
    } else if (part == "faults") {
        test_faults();
    } else if (part == "errors") {
        test_errors();
    } else if (part == "once") {
        test_once();
    } else {
        std::fprintf(stderr, "usage: sim_gate choices|full [stride]|faults|errors|once\n");
        return 2;
    }
    std::printf("%s: %d failed\n", part.c_str(), failures);
    return failures == 0 ? 0 : 1;
}
