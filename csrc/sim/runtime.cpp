#include "sim/runtime.hpp"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "sim/error_names.hpp"
#include "sim/source_line.hpp"

namespace strata::sim {

using Work = std::function<int()>;

struct Device;

struct StreamState {
    Device* device = nullptr;
    std::vector<Work> queue;
    bool capturing = false;
    bool invalidated = false;  // the capture
    CaptureMode mode = CaptureMode::Global;
    std::size_t captured = 0;
};

struct EventState {
    StreamState* stream = nullptr;
    std::size_t position = 0;  // works of the stream that came before it
    std::chrono::steady_clock::time_point time;
};

struct Device {
    Card card;
    Memory memory;
    std::uint64_t seed = 0;
    std::uint64_t launches = 0;
    std::map<const void*, std::size_t> shared_limits;
    StreamState default_stream;
    Fault fault;  // that left the device unusable
};

namespace {

constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidConfiguration = 9;
constexpr int kInvalidPointer = 17;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidHandle = 400;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureInvalidated = 901;
constexpr int kInvalidClusterSize = 912;

constexpr std::size_t kCalls = std::size(kCallNames);
static_assert(kCalls == static_cast<std::size_t>(Call::Launch) + 1);

struct Plant {
    Call call;
    long at;
    int code;
};

struct Machine {
    std::mutex mutex;
    std::vector<std::unique_ptr<Device>> devices;
    std::vector<std::unique_ptr<StreamState>> streams;
    std::vector<std::unique_ptr<EventState>> events;
    std::array<long, kCalls> calls{};
    std::vector<Plant> plants;
    std::FILE* trace = nullptr;
    void (*listener)(const CallSeen&) = nullptr;
    void (*stand_in)(const Launch&, std::size_t) = nullptr;
};

Machine& machine() {
    static Machine* const kept = new Machine;
    return *kept;
}

thread_local int this_device = 0;
thread_local int last_error = 0;
thread_local CaptureMode capture_mode = CaptureMode::Global;

Device* device_here() {
    auto& devices = machine().devices;
    const auto index = static_cast<std::size_t>(this_device);
    return index < devices.size() ? devices[index].get() : nullptr;
}

int fail(int code) {
    if (code != 0) last_error = code;
    return code;
}

// Every call begins so, with the machine locked: counts it, and gives what was planted for it, or what the device has
// been unusable for.
int enter(Call call, const void* kernel = nullptr, Stream stream = nullptr) {
    Machine& m = machine();
    if (m.listener != nullptr) m.listener({call, kernel, stream});
    const long number = ++m.calls[static_cast<std::size_t>(call)];
    int code = 0;
    for (const Plant& plant : m.plants) {
        if (plant.call == call && plant.at == number) code = plant.code;
    }
    Device* device = device_here();
    const bool of_all = call == Call::CountDevices || call == Call::SetDevice;
    if (device == nullptr) {
        if (code == 0 && !of_all) code = kNoDevice;
    } else if (device->fault.code != 0 && !of_all) {
        code = device->fault.code;
    } else if (code != 0 && fused_gr_context_fatal(code, device->card.vendor)) {
        device->fault = {code, "planted"};
    }
    if (m.trace != nullptr) {
        const std::string name = kernel == nullptr ? "" : " " + function_name(kernel);
        std::fprintf(m.trace, "%s%s %d\n", kCallNames[static_cast<std::size_t>(call)], name.c_str(), code);
        std::fflush(m.trace);
    }
    return fail(code);
}

// A call that no capture in global mode allows from any thread that is not relaxed: it breaks the capture.
int refuse_in_capture() {
    Machine& m = machine();
    if (capture_mode == CaptureMode::Relaxed) return 0;
    bool broken = false;
    const auto look = [&](StreamState& stream) {
        if (!stream.capturing || stream.mode != CaptureMode::Global) return;
        stream.invalidated = true;
        broken = true;
    };
    for (const auto& stream : m.streams) look(*stream);
    for (const auto& device : m.devices) look(device->default_stream);
    return broken ? fail(kCaptureUnsupported) : 0;
}

StreamState* state_of(Stream stream) {
    if (stream == nullptr) return &device_here()->default_stream;
    for (const auto& known : machine().streams) {
        if (known.get() == stream) return stream;
    }
    return nullptr;
}

int drain(StreamState& stream) {
    const std::vector<Work> queue = std::exchange(stream.queue, {});
    for (const Work& work : queue) {
        if (const int code = work()) return fail(code);
    }
    return 0;
}

int add(StreamState& stream, Work work) {
    if (stream.capturing) {
        stream.captured += 1;
    } else {
        stream.queue.push_back(std::move(work));
    }
    return 0;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

GrBackend vendor() {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    const Device* device = device_here();
    return device == nullptr ? GrBackend::Cuda : device->card.vendor;
}

const char* error_name(int code) { return error_name(code, vendor()); }

const char* error_text(int code) {
    static thread_local std::string text;
    const std::lock_guard<std::mutex> lock(machine().mutex);
    const Device* device = device_here();
    if (device != nullptr && device->fault.code == code && code != 0) return (text = device->fault.text).c_str();
    for (const GrErrorRow& row : kGrErrors) {
        if (row.code == code) return row.meaning;
    }
    return "no such code";
}

int pending_error() { return last_error; }
int take_error() { return std::exchange(last_error, 0); }
void set_pending(int code) { last_error = code; }

int count_devices(int* count) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    *count = 0;
    if (const int code = enter(Call::CountDevices)) return code;
    *count = static_cast<int>(machine().devices.size());
    return *count == 0 ? fail(kNoDevice) : 0;
}

int get_device(int* device) {
    *device = this_device;
    return 0;
}

int set_device(int device) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::SetDevice)) return code;
    if (device < 0 || static_cast<std::size_t>(device) >= machine().devices.size()) return fail(kInvalidDevice);
    this_device = device;
    return 0;
}

int device_card(int device, Card* card) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::Properties)) return code;
    if (device < 0 || static_cast<std::size_t>(device) >= machine().devices.size()) return fail(kInvalidDevice);
    *card = machine().devices[static_cast<std::size_t>(device)]->card;
    return 0;
}

int set_shared_limit(const void* kernel, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::Attribute, kernel)) return code;
    if (bytes > device_here()->card.shared_most) return fail(kInvalidValue);
    device_here()->shared_limits[kernel] = bytes;
    return 0;
}

int preload(const void* kernel) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    return enter(Call::Preload, kernel);
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

int device_allocate(void** out, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    *out = nullptr;
    if (const int code = enter(Call::Malloc)) return code;
    if (const int code = refuse_in_capture()) return code;
    *out = device_here()->memory.allocate(bytes);
    return *out == nullptr ? fail(kOutOfMemory) : 0;
}

int device_free(void* pointer) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::Free)) return code;
    if (const int code = refuse_in_capture()) return code;
    if (pointer == nullptr) return 0;
    // A free waits for all work of the device.
    for (const auto& stream : machine().streams) {
        if (stream->device != device_here()) continue;
        if (const int code = drain(*stream)) return code;
    }
    if (const int code = drain(device_here()->default_stream)) return code;
    return device_here()->memory.release(pointer) ? 0 : fail(kInvalidPointer);
}

int fill_bytes(void* to, int byte, std::size_t bytes, Stream stream) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::Memset, nullptr, stream)) return code;
    StreamState* state = state_of(stream);
    if (state == nullptr) return fail(kInvalidHandle);
    Device* device = device_here();
    return add(*state, [=] {
        std::memset(to, byte, bytes);
        device->memory.define(to, bytes);
        return 0;
    });
}

int copy_bytes(void* to, const void* from, std::size_t bytes, Stream stream) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::Memcpy, nullptr, stream)) return code;
    StreamState* state = state_of(stream);
    if (state == nullptr) return fail(kInvalidHandle);
    Device* device = device_here();
    return add(*state, [=] {
        std::memcpy(to, from, bytes);
        device->memory.define(to, bytes);
        return 0;
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events

int stream_create(Stream* out) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    *out = nullptr;
    if (const int code = enter(Call::StreamCreate)) return code;
    machine().streams.push_back(std::make_unique<StreamState>());
    *out = machine().streams.back().get();
    (*out)->device = device_here();
    return 0;
}

int stream_synchronize(Stream stream) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::StreamSync, nullptr, stream)) return code;
    StreamState* state = state_of(stream);
    if (state == nullptr) return fail(kInvalidHandle);
    if (state->capturing) {
        state->invalidated = true;
        return fail(kCaptureUnsupported);
    }
    return drain(*state);
}

int stream_destroy(Stream stream) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::StreamDestroy, nullptr, stream)) return code;
    auto& streams = machine().streams;
    for (auto it = streams.begin(); it != streams.end(); ++it) {
        if (it->get() != stream) continue;
        const int code = drain(**it);
        streams.erase(it);
        return code;
    }
    return fail(kInvalidHandle);
}

int event_create(Event* out) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    *out = nullptr;
    if (const int code = enter(Call::EventCreate)) return code;
    machine().events.push_back(std::make_unique<EventState>());
    *out = machine().events.back().get();
    return 0;
}

int event_record(Event event, Stream stream) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::EventRecord)) return code;
    StreamState* state = state_of(stream);
    if (state == nullptr || event == nullptr) return fail(kInvalidHandle);
    event->stream = state;
    return add(*state, [event] {
        event->time = std::chrono::steady_clock::now();
        return 0;
    });
}

int event_synchronize(Event event) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::EventSync)) return code;
    if (event == nullptr) return fail(kInvalidHandle);
    return event->stream == nullptr ? 0 : drain(*event->stream);
}

int event_elapsed_ms(float* out, Event from, Event to) {
    *out = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return 0;
}

int event_destroy(Event event) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::EventDestroy)) return code;
    auto& events = machine().events;
    for (auto it = events.begin(); it != events.end(); ++it) {
        if (it->get() != event) continue;
        if (event->stream != nullptr) drain(*event->stream);  // its record is in the queue
        events.erase(it);
        return 0;
    }
    return fail(kInvalidHandle);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches and captures

int launch(Launch launch, std::size_t argument_bytes, Stream stream) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (const int code = enter(Call::Launch, launch.kernel, stream)) return code;
    StreamState* state = state_of(stream);
    if (state == nullptr) return fail(kInvalidHandle);
    Device* device = device_here();
    const auto limit = device->shared_limits.find(launch.kernel);
    const std::size_t allowed = limit == device->shared_limits.end()
                                    ? device->card.shared_plain
                                    : std::max(limit->second, device->card.shared_plain);
    if (launch.shared_bytes > allowed) return fail(kInvalidValue);
    if (launch.block < 1 || launch.block > 1024 || launch.grid[0] < 1 || launch.grid[1] < 1 || launch.grid[2] < 1 ||
        launch.grid[0] > 0x7fffffffu || launch.grid[1] > 0xffffu || launch.grid[2] > 0xffffu) {
        return fail(kInvalidConfiguration);
    }
    if (launch.cluster != 1) {
        if (!device->card.clusters) return fail(kInvalidConfiguration);
        if (launch.cluster < 1 || launch.cluster > kMostInCluster || launch.grid[0] % launch.cluster != 0 ||
            launch.grid[1] != 1 || launch.grid[2] != 1) {
            return fail(kInvalidClusterSize);
        }
    }
    const auto* first = static_cast<const unsigned char*>(launch.arguments);
    const auto arguments = std::make_shared<std::vector<unsigned char>>(first, first + argument_bytes);
    return add(*state, [launch, arguments, device]() mutable {
        if (device->fault.code != 0) return device->fault.code;
        launch.arguments = arguments->data();
        if (const auto stand_in = machine().stand_in) {
            stand_in(launch, arguments->size());
            return 0;
        }
        const std::uint64_t seed = device->seed + 0x632be59bd9b4e019ull * device->launches++;
        return execute(device->card, device->memory, launch, seed, &device->fault) ? 0 : device->fault.code;
    });
}

CaptureMode exchange_capture_mode(CaptureMode mode) { return std::exchange(capture_mode, mode); }

int stream_is_capturing(Stream stream, bool* out) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    *out = false;
    if (const int code = enter(Call::StreamQuery, nullptr, stream)) return code;
    const StreamState* state = state_of(stream);
    if (state == nullptr) return fail(kInvalidHandle);
    *out = state->capturing;
    return 0;
}

int begin_capture(Stream stream, CaptureMode mode) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    StreamState* state = state_of(stream);
    if (state == nullptr) return fail(kInvalidHandle);
    if (const int code = drain(*state)) return code;
    state->capturing = true;
    state->invalidated = false;
    state->mode = mode;
    state->captured = 0;
    return 0;
}

int end_capture(Stream stream, std::size_t* launches) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    StreamState* state = state_of(stream);
    if (state == nullptr || !state->capturing) return fail(kInvalidHandle);
    state->capturing = false;
    *launches = state->captured;
    return state->invalidated ? fail(kCaptureInvalidated) : 0;
}

// ---------------------------------------------------------------------------------------------------------------------

int open_card(const char* name, std::uint64_t seed, std::string* problem) {
    auto device = std::make_unique<Device>();
    if (!find_card(name, &device->card, problem)) return -1;
    device->seed = seed;
    device->default_stream.device = device.get();
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().devices.push_back(std::move(device));
    return static_cast<int>(machine().devices.size()) - 1;
}

void declare(int device, const char* name, const void* begin, std::size_t bytes, bool writable, bool defined) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().devices.at(static_cast<std::size_t>(device))->memory.declare(name, begin, bytes, writable, defined);
}

void withdraw(int device) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().devices.at(static_cast<std::size_t>(device))->memory.withdraw_declared();
}

void plant(Call call, long nth, int code) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    if (nth == 0) return machine().plants.clear();
    machine().plants.push_back({call, machine().calls[static_cast<std::size_t>(call)] + nth, code});
}

long calls(Call call) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    return machine().calls[static_cast<std::size_t>(call)];
}

long live_allocations() {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    std::size_t sum = 0;
    for (const auto& device : machine().devices) sum += device->memory.allocations();
    return static_cast<long>(sum);
}

long live_streams() {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    return static_cast<long>(machine().streams.size());
}

long live_events() {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    return static_cast<long>(machine().events.size());
}

void tell_calls(void (*listener)(const CallSeen&)) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().listener = listener;
}

void replace_kernels(void (*stand_in)(const Launch&, std::size_t)) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().stand_in = stand_in;
}

void trace(const char* path) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    std::FILE*& file = machine().trace;
    if (file != nullptr) std::fclose(file);
    file = path == nullptr ? nullptr : std::fopen(path, "w");
}

}  // namespace strata::sim
