// How each runtime error ends: every code of the policy's table, and one that is on no list, at every call that the
// check makes and at every call of a read. Which calls those are is recorded; what is expected of each follows from
// what it is about: an error at a kernel of P4's or on its stream costs P4, any other one the check, and a code that no
// device survives the process.
//
// No kernel runs: stand_in.hpp's answers take their place.
#include <sys/mman.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "common/launch_plan.hpp"
#include "common/selftest_cases.hpp"
#include "gate_scenarios.hpp"
#include "sim/source_line.hpp"
#include "stand_in.hpp"

using namespace strata;
using namespace strata::test;

namespace {

constexpr int kOnNoList = 4242;
constexpr int kReadTokens = 7;  // two launches of the down projection where 64 KiB hold six tokens

// ---------------------------------------------------------------------------------------------------------------------
// The calls

// Whom a call is made for: everybody; P4 alone (a kernel of its own or its stream); the variant stream alone, which
// nobody asked for here.
enum Owner { kShared, kCandidate, kBystander };

struct Site {
    sim::Call call;
    int nth;     // of its kind, from 1
    int before;  // calls of any kind before it
    Owner owner;
    std::string name() const {
        constexpr const char* kWhose[] = {"", ", P4's", ", stream's"};
        return std::string(sim::kCallNames[static_cast<int>(call)]) + kWhose[owner];
    }
};

std::vector<sim::CallSeen> seen;  // in a recording child
long* shared_calls = nullptr;     // made by the child of a scenario; survives it

Owner owner_of(const sim::CallSeen& call, sim::Stream reference) {
    const std::string kernel = call.kernel != nullptr ? sim::function_name(call.kernel) : "";
    const auto names = [&](const char* part) { return kernel.find(part) != std::string::npos; };
    if (names("register_half")) return kCandidate;
    if (names("gr_stream") || names("gr_cluster") || names("ByQuarters")) return kBystander;
    return call.stream != nullptr && call.stream != reference ? kCandidate : kShared;
}

// The calls that `body` makes, told by a child.
std::vector<Site> record(const Environment& environment, const std::function<void()>& prepare,
                         const std::function<void()>& body) {
    const Outcome outcome = run(environment, [&] {
        prepare();
        sim::tell_calls([](const sim::CallSeen& call) { seen.push_back(call); });
        body();
        sim::tell_calls(nullptr);
        sim::Stream reference = nullptr;
        std::map<sim::Call, int> made;
        for (const sim::CallSeen& call : seen) {
            if (reference == nullptr) reference = call.stream;
            const int nth = ++made[call.call];
            const bool second_stream = call.call == sim::Call::StreamCreate && nth == 2;
            const Owner owner = second_stream ? kCandidate : owner_of(call, reference);
            say("site=%d %d %d", static_cast<int>(call.call), nth, owner);
        }
    });
    std::vector<Site> sites;
    for (const std::string& line : outcome.all("site")) {
        int call = 0, nth = 0, owner = 0;
        std::sscanf(line.c_str(), "%d %d %d", &call, &nth, &owner);
        sites.push_back({static_cast<sim::Call>(call), nth, static_cast<int>(sites.size()), static_cast<Owner>(owner)});
    }
    expect(outcome.status == 0 && !sites.empty(), "recording", "status " + std::to_string(outcome.status));
    return sites;
}

// ---------------------------------------------------------------------------------------------------------------------
// What happened

struct Table {
    std::string title;
    std::vector<std::string> verdicts;
    std::map<std::string, std::map<std::string, int>> rows;
    std::map<std::string, int> calls;

    void print() const {
        std::map<std::string, int> sums;
        int call_sum = 0;
        std::printf("\n%-34s %5s", title.c_str(), "calls");
        for (const std::string& verdict : verdicts) std::printf(" %14s", verdict.c_str());
        const auto line = [&](const std::string& name, int count, std::map<std::string, int> row) {
            std::printf("\n  %-32s %5d", name.c_str(), count);
            for (const std::string& verdict : verdicts) std::printf(" %14d", row[verdict]);
        };
        for (const auto& [name, row] : rows) {
            line(name, calls.at(name), row);
            call_sum += calls.at(name);
            for (const auto& [verdict, count] : row) sums[verdict] += count;
        }
        line("all", call_sum, sums);
        std::printf("\n");
    }
};

GrBackend vendor_of(const std::string& card) {
    return card.compare(0, 3, "sm_") == 0 ? GrBackend::Cuda : GrBackend::Hip;
}

std::vector<int> every_code() {
    std::vector<int> codes;
    for (const GrErrorRow& row : kGrErrors) {
        if (row.code != 0) codes.push_back(row.code);
    }
    codes.push_back(kOnNoList);
    return codes;
}

std::string parenthesised(int code) { return "(" + std::to_string(code) + ")"; }

// In a child: counts the scenarios that ended as they should, and says what is wrong with the others.
struct Judge {
    std::string scenario;
    int good = 0;
    bool all = true;

    void begin(const std::string& name) {
        scenario = name;
        all = true;
    }
    void want(bool holds, const std::string& what) {
        if (!holds) say("wrong=%s: %s", scenario.c_str(), what.c_str());
        all &= holds;
    }
    void end() { good += all; }
};

int judged(const Outcome& outcome, const std::string& scenario) {
    expect(outcome.status == 0, scenario, "status " + std::to_string(outcome.status));
    for (const std::string& wrong : outcome.all("wrong")) expect(false, wrong, "");
    return std::atoi(outcome.at("good").c_str());
}

// A code that no device survives: one line, status 1, no destructor, and not one more call.
bool ends_process(const Outcome& o, const std::string& scenario, int code, long calls_expected) {
    const auto lines = o.all("stderr");
    const bool ended = o.status == 1;
    const bool quiet = o.at("destructors").empty() && o.at("survived").empty();
    const bool said = lines.size() == 1 && lines[0].find("strata_ops: fatal: ") == 0 &&
                      lines[0].find(parenthesised(code) + " from ") != std::string::npos;
    const bool last = *shared_calls == calls_expected;
    expect(ended, scenario, "ends the process with 1, but: " + std::to_string(o.status));
    expect(quiet, scenario, "destructors ran");
    expect(said, scenario, "one line with code and call: " + (lines.empty() ? "none" : lines[0]));
    expect(last, scenario,
           "no call after it: " + std::to_string(*shared_calls) + ", not " + std::to_string(calls_expected));
    return ended && quiet && said && last;
}

void count_calls() {
    *shared_calls = 0;
    sim::tell_calls([](const sim::CallSeen&) { ++*shared_calls; });
}

// ---------------------------------------------------------------------------------------------------------------------
// Reads at the model's geometry

bool model_read(int device, const char* variant, Report* report) {
    constexpr Geometry g = kModelGeometry;
    static Buffer<float> some(kMaxTokens * g.depth() * 2);  // for whatever is not looked at
    static SelftestAnswer out = [] {
        SelftestAnswer made;
        for (int i = 0; i < kSelftestOutputs; ++i) {
            made.bytes[i] = selftest_output_bytes({kReadTokens, {}, true, true, true}, i);
            made.of[i] = Buffer<unsigned char>(made.bytes[i]);
        }
        return made;
    }();
    const auto output = [&](int i) { return reinterpret_cast<float*>(out.of[i].data()); };
    const auto weights = reinterpret_cast<const std::uint16_t*>(some.data());
    ReadArgs args{};
    args.geometry = g;
    args.tokens = kReadTokens;
    args.eps = kSelftestEps;
    args.residual = args.block_out = args.w_norm = args.inject_prev = some.data();
    args.w_down = args.w_up = args.w_inject = weights;
    args.mixed = output(0);
    args.inject = output(1);
    args.residual_out = output(2);
    args.lo = output(3);
    args.rs = output(4);
    args.q8_1 = out.of[5].data();
    args.scratch = some.data();
    for (int i = 0; i < kSelftestOutputs; ++i)
        std::memset(out.of[i].data(), 0x77, static_cast<std::size_t>(out.bytes[i]));
    ReadChoice choice;
    choice.variant = variant;
    if (!backend().read(&args, &choice, device, nullptr, report)) return false;
    if (sim::stream_synchronize(nullptr) != 0) return false;
    for (int i = 0; i < kSelftestOutputs; ++i) {
        const auto size = static_cast<std::size_t>(out.bytes[i]);
        if (std::memcmp(out.of[i].data(), stand_in_answer({}, true).of[i].data(), size) != 0) return false;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// The check

struct CheckScenario {
    std::string card;
    Environment environment;
    int case_stride;
    std::vector<int> codes;
};

std::string last_line;  // that the library said

int prepared_device = -1;

// The card to be checked is not the current one, so that the calls which make it current are made.
void prepare_check(const CheckScenario& s) {
    use_stand_in();
    gpu::planted_fault().case_stride = s.case_stride;
    const int home = open_card(s.card);
    prepared_device = open_card(s.card);
    backend().set_log([](LogLevel, const char* line) { last_line = line; });
    sim::set_device(home);
}

// What an error that leaves the device usable does to a check.
void judge_check(const CheckScenario& s, const Site& site, int code, Judge& judge) {
    const bool wants_p4 = s.environment.count("STRATA_HC_SPLIT") != 0;
    const long allocations = sim::live_allocations();
    const long streams = sim::live_streams();
    prepare_check(s);
    const int device = prepared_device;
    last_line.clear();
    sim::plant(site.call, site.nth, code);
    Report report;
    const bool completed = backend().check(device, nullptr, nullptr, &report);
    sim::plant(site.call, 0, 0);

    judge.want(sim::pending_error() == 0, "left pending: " + std::to_string(sim::pending_error()));
    // A free or a destroy that failed is the one thing that cannot be given back.
    judge.want(sim::live_allocations() - allocations == (site.call == sim::Call::Free), "memory is left behind");
    judge.want(sim::live_streams() - streams == (site.call == sim::Call::StreamDestroy), "streams are left behind");

    sim::set_device(device);
    DeviceFacts facts{};
    Report ignored;
    judge.want(backend().describe(device, &facts, &ignored), ignored.text);
    const bool p4_left = wants_p4 && site.owner == kBystander;
    const char* const left = p4_left ? "p4" : "staged";
    judge.want(std::strcmp(facts.chosen, left) == 0, std::string(left) + " runs, not " + facts.chosen);
    if (site.owner == kBystander) {
        const Gates& g = facts.gates;
        judge.want(completed && g.plain && g.split && g.staged && g.runtime_geometry && g.tiled && g.wide_up &&
                       g.p4 == wants_p4,
                   std::string("nothing is lost: ") + report.text);
    } else if (site.owner == kCandidate) {
        const Gates& g = facts.gates;
        judge.want(completed && g.plain && g.split && g.staged && g.runtime_geometry && g.tiled && g.wide_up && !g.p4,
                   std::string("only P4 is lost: ") + report.text);
        judge.want(!wants_p4 || (last_line.find("P4 was asked for and is refused") != std::string::npos &&
                                 last_line.find(parenthesised(code)) != std::string::npos),
                   "said: " + last_line);
    } else {
        judge.want(!completed && facts.gates.state != CheckState::Completed, "the check is not completed");
        judge.want(std::strstr(report.text, parenthesised(code).c_str()) != nullptr, report.text);
    }
    for (const char* variant : {static_cast<const char*>(nullptr), "plain", "split", "staged"}) {
        Report read;
        judge.want(model_read(device, variant, &read),
                   std::string(variant == nullptr ? "the op" : variant) + " is usable: " + read.text);
    }
    Report again;
    judge.want(backend().check(device, nullptr, nullptr, &again), again.text);
    judge.want(
        backend().describe(device, &facts, &ignored) && std::strcmp(facts.chosen, wants_p4 ? "p4" : "staged") == 0,
        std::string("a second check ends well: ") + facts.chosen);
}

void test_check(const CheckScenario& s) {
    const std::vector<Site> sites = record(
        s.environment, [&] { prepare_check(s); },
        [] {
            Report report;
            if (!backend().check(prepared_device, nullptr, nullptr, &report)) std::exit(7);
        });
    Table table{"check on " + s.card, {"nothing", "candidate only", "whole check", "exit"}, {}, {}};
    for (const Site& site : sites) {
        const std::string at = "check on " + s.card + ", " + site.name() + " " + std::to_string(site.nth) + " gives ";
        auto& row = table.rows[site.name()];
        ++table.calls[site.name()];
        const Outcome ordinary = run(s.environment, [&] {
            Judge judge;
            for (const int code : s.codes) {
                if (fused_gr_context_fatal(code, vendor_of(s.card))) continue;
                judge.begin(at + std::to_string(code));
                judge_check(s, site, code, judge);
                judge.end();
            }
            say("good=%d", judge.good);
        });
        constexpr const char* kCosts[] = {"whole check", "candidate only", "nothing"};
        row[kCosts[site.owner]] += judged(ordinary, at);
        for (const int code : s.codes) {
            if (!fused_gr_context_fatal(code, vendor_of(s.card))) continue;
            const Outcome fatal = run(s.environment, [&] {
                prepare_check(s);
                count_calls();
                sim::plant(site.call, site.nth, code);
                Report report;
                backend().check(prepared_device, nullptr, nullptr, &report);
                say("survived=%s", report.text);
            });
            row["exit"] += ends_process(fatal, at + std::to_string(code), code, site.before + 1);
        }
    }
    table.print();
}

// ---------------------------------------------------------------------------------------------------------------------
// Reads: a launch that fails raises, whatever the code. Before it, what cannot be learned of the device raises; where
// kernels cannot be loaded the read goes on, and raises only where its launch needs what was not set.

void prepare_read(const std::string& card) {
    use_stand_in();
    gpu::planted_fault().case_stride = kSelftestCases;
    prepared_device = open_card(card);
    sim::set_device(prepared_device);
}

void judge_read(const std::string& card, const char* variant, const Site& site, bool goes_on, int code, Judge& judge) {
    const bool fatal = fused_gr_context_fatal(code, vendor_of(card));
    prepare_read(card);
    sim::plant(site.call, site.nth, code);
    Report report;
    const bool done = model_read(prepared_device, variant, &report);
    sim::plant(site.call, 0, 0);
    judge.want(done == goes_on, std::string(goes_on ? "goes on: " : "raises: ") + report.text);
    judge.want(goes_on || std::strstr(report.text, parenthesised(code).c_str()) != nullptr, report.text);
    judge.want(site.call != sim::Call::Launch || std::strncmp(report.text, "gr_", 3) == 0, report.text);
    judge.want(sim::pending_error() == (fatal ? code : 0), "pending: " + std::to_string(sim::pending_error()));
    Report next;
    const bool again = model_read(prepared_device, variant, &next);
    judge.want(again != fatal, std::string("the next read: ") + next.text);
    judge.want(!fatal || std::strstr(next.text, "which was reported then") != nullptr, next.text);
    sim::take_error();
}

void test_read(const std::string& card, const Environment& environment, const std::vector<int>& codes) {
    const bool checks = environment.count("STRATA_SELFTEST") == 0;
    Table table{(checks ? "first reads on " : "reads on ") + card, {"raises", "goes on", "exit"}, {}, {}};
    for (const char* variant :
         {static_cast<const char*>(nullptr), "plain", "split", "staged", "p4", "tiled", "runtime_geometry"}) {
        const auto read = [&] {
            Report report;
            if (!model_read(prepared_device, variant, &report)) std::exit(7);
        };
        const std::vector<Site> sites = record(environment, [&] { prepare_read(card); }, read);
        const auto attribute = std::find_if(sites.begin(), sites.end(),
                                            [](const Site& site) { return site.call == sim::Call::Attribute; });
        for (const Site& site : sites) {
            const bool launch = site.call == sim::Call::Launch;
            if (site.call == sim::Call::StreamSync) continue;               // the test's own
            if (!launch && variant != nullptr) continue;                    // met already
            if (checks != (site.call == sim::Call::StreamQuery)) continue;  // test_check has the check's calls
            const std::string name =
                launch ? "launch, " + std::string(variant == nullptr ? "the op's choice" : variant) : site.name();
            const std::string at = "read on " + card + ", " + name + " " + std::to_string(site.nth) + " gives ";
            // On NVIDIA's card staged's first attribute is what lets it have the bytes for these tokens.
            const bool loads = site.call == sim::Call::Attribute || site.call == sim::Call::Preload;
            const bool goes_on = loads && (vendor_of(card) == GrBackend::Hip || site.before > attribute->before);
            auto& row = table.rows[name];
            ++table.calls[name];
            const Outcome survivors = run(environment, [&] {
                Judge judge;
                for (const int code : codes) {
                    if (!launch && fused_gr_context_fatal(code, vendor_of(card))) continue;
                    judge.begin(at + std::to_string(code));
                    judge_read(card, variant, site, goes_on, code, judge);
                    judge.end();
                }
                say("good=%d", judge.good);
            });
            row[goes_on ? "goes on" : "raises"] += judged(survivors, at);
            for (const int code : codes) {
                if (launch || !fused_gr_context_fatal(code, vendor_of(card))) continue;
                const Outcome fatal = run(environment, [&] {
                    prepare_read(card);
                    count_calls();
                    sim::plant(site.call, site.nth, code);
                    Report report;
                    model_read(prepared_device, variant, &report);
                    say("survived=%s", report.text);
                });
                row["exit"] += ends_process(fatal, at + std::to_string(code), code, site.before + 1);
            }
        }
    }
    table.print();
}

// A count that fails is no fault of a device that is in use: it is reported, whatever the code.
void test_count() {
    int scenarios = 0;
    for (const int code : every_code()) {
        const Outcome o = run({}, [&] {
            prepare_read("gfx1201");
            sim::plant(sim::Call::CountDevices, 1, code);
            Report report;
            say("count=%d %s", backend().device_count(&report), report.text);
            say("pending=%d", sim::pending_error());
        });
        const std::string scenario = "counting devices gives " + std::to_string(code);
        expect(o.status == 0 && o.at("count").find("-1 no usable sim device: ") == 0, scenario, o.at("count"));
        expect(o.at("pending") == "0", scenario, "left pending: " + o.at("pending"));
        ++scenarios;
    }
    std::printf("\ncounting devices: %d scenarios\n", scenarios);
}

// Another library's pending error is neither eaten nor blamed on us, whoever asks first.
void test_pending() {
    const struct {
        const char* name;
        std::function<bool(int, Report*)> call;
    } firsts[] = {
        {"read", [](int device, Report* report) { return model_read(device, nullptr, report); }},
        {"check", [](int device, Report* report) { return backend().check(device, nullptr, nullptr, report); }},
        {"check of a known device",
         [](int device, Report* report) {
             const int pending = sim::take_error();
             DeviceFacts facts{};
             backend().describe(device, &facts, report);
             sim::set_pending(pending);
             count_calls();
             return backend().check(device, nullptr, nullptr, report);
         }},
        {"describe",
         [](int device, Report* report) {
             DeviceFacts facts{};
             return backend().describe(device, &facts, report);
         }},
    };
    int scenarios = 0;
    for (const auto& first : firsts) {
        for (const int code : every_code()) {
            const bool fatal = fused_gr_context_fatal(code, GrBackend::Hip);
            const std::string scenario = std::string(first.name) + " with pending " + std::to_string(code);
            const Outcome o = run({}, [&] {
                prepare_read("gfx1201");
                sim::set_pending(code);
                count_calls();
                Report report;
                say("done=%d", first.call(prepared_device, &report));
                say("text=%s", report.text);
                say("pending=%d", sim::pending_error());
            });
            ++scenarios;
            expect(o.status == 0, scenario, "status " + std::to_string(o.status));
            expect(o.at("pending") == std::to_string(code), scenario, "it is still there, but: " + o.at("pending"));
            expect(o.at("done") == (fatal ? "0" : "1"), scenario, o.at("text"));
            expect(!fatal || (o.at("text").find("not of strata_ops") != std::string::npos && *shared_calls == 0),
                   scenario, "asks nothing and says so: " + o.at("text"));
        }
    }
    std::printf("\npending errors of others: %d scenarios\n", scenarios);
}

}  // namespace

int main() {
    shared_calls =
        static_cast<long*>(mmap(nullptr, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    stand_in_answer({}, false);  // before there are children
    const Environment p4{{"STRATA_HC_SPLIT", "7"}};
    test_check({"gfx1201", p4, kSelftestCases, every_code()});
    test_check({"sm_90", {}, kSelftestCases, every_code()});
    // The case with all options besides, whose calls are three times as many: a code of each class.
    test_check({"gfx1201", p4, kSelftestCases - 1, {2, 700, 999, kOnNoList}});
    test_read("gfx1201", {{"STRATA_SELFTEST", "0"}}, every_code());
    test_read("sm_90", {{"STRATA_SELFTEST", "0"}}, every_code());
    test_read("gfx1201", p4, every_code());
    test_count();
    test_pending();
    std::printf("errors: %d failed\n", failures);
    return failures == 0 ? 0 : 1;
}
