# The simulated cards: csrc/gpu compiled for the host, twice.
#
#   strata_sim          strata_ops/lib/libstrata_sim.so          fast
#   strata_sim_strict   strata_ops/lib/libstrata_sim_strict.so   every access of a kernel goes through the detectors
#
# They need Boost.Context. Without it they are left out, and `strata_ops` says so.
set(STRATA_SIM AUTO CACHE STRING "Simulated cards: AUTO where Boost.Context is found, ON, OFF")
set_property(CACHE STRATA_SIM PROPERTY STRINGS AUTO ON OFF)
if(NOT STRATA_SIM MATCHES "^(AUTO|ON|OFF)$")
  strata_stop("STRATA_SIM is AUTO, ON or OFF, not ${STRATA_SIM}")
endif()
if(STRATA_SIM STREQUAL "OFF")
  return()
endif()

find_path(STRATA_BOOST_INCLUDE boost/context/fiber.hpp)
# The static library where there is one: it saves users of the package a dependency.
find_library(STRATA_BOOST_CONTEXT NAMES libboost_context.a boost_context)
if(NOT STRATA_BOOST_INCLUDE OR NOT STRATA_BOOST_CONTEXT)
  set(trouble "Boost.Context is missing (Debian: libboost-context-dev, Fedora: boost-devel)")
  if(STRATA_SIM STREQUAL "ON" OR STRATA_REQUIRE_ALL)
    strata_stop("cannot build the simulated cards: ${trouble}")
  endif()
  message(STATUS "left out: the simulated cards (${trouble})")
  return()
endif()

# What any file that sees gpu/vendor/sim.hpp is compiled with: strata_flags, but with csrc by a path from the build's
# folder. The alignment checks carry the names of files as the compiler met them, and no -ffile-prefix-map changes those.
# `#pragma unroll` is for the cards' compilers, and errors name their source lines from line tables.
file(RELATIVE_PATH here ${CMAKE_BINARY_DIR} ${PROJECT_SOURCE_DIR})
add_library(strata_sim_flags INTERFACE)
target_compile_definitions(strata_sim_flags INTERFACE STRATA_SIM)
target_include_directories(strata_sim_flags SYSTEM INTERFACE ${STRATA_BOOST_INCLUDE})
target_compile_options(
  strata_sim_flags
  INTERFACE $<TARGET_PROPERTY:strata_flags,INTERFACE_COMPILE_OPTIONS> -I${here}/csrc -O2 -g1
            -ffile-prefix-map=${CMAKE_BINARY_DIR}=build
            $<$<CXX_COMPILER_ID:GNU>:-Wno-unknown-pragmas> $<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>)
# And a file that holds kernels, for the strict card.
set(STRATA_SIM_INSTRUMENTED -fsanitize=thread,alignment)

file(GLOB sim_core CONFIGURE_DEPENDS csrc/sim/*.cpp)
foreach(file kernels device backend strict traffic sanitizer_calls)
  list(REMOVE_ITEM sim_core ${PROJECT_SOURCE_DIR}/csrc/sim/${file}.cpp)
endforeach()
# The cards without kernels, which the C++ tests bring themselves.
add_library(strata_sim_core OBJECT ${sim_core})
add_library(strata_sim_strict_core OBJECT ${sim_core} csrc/sim/strict.cpp csrc/sim/traffic.cpp
                                          csrc/sim/sanitizer_calls.cpp)

foreach(name strata_sim strata_sim_strict)
  target_link_libraries(${name}_core PRIVATE strata_sim_flags)
  add_library(${name}_kernels OBJECT csrc/sim/kernels.cpp)
  target_link_libraries(${name}_kernels PRIVATE strata_sim_flags)
  add_library(${name} SHARED $<TARGET_OBJECTS:${name}_core> $<TARGET_OBJECTS:${name}_kernels> csrc/sim/device.cpp
                             csrc/sim/backend.cpp)
  target_link_libraries(${name} PRIVATE strata_sim_flags ${STRATA_BOOST_CONTEXT} ${CMAKE_DL_LIBS})
  target_compile_definitions(${name} PRIVATE STRATA_BUILT_FOR="simulated cards")
  target_link_options(${name} PRIVATE -Wl,--no-undefined
                      -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/sim_exports.map)
  set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/sim_exports.map)
  install(TARGETS ${name} LIBRARY DESTINATION lib)
endforeach()
foreach(target strata_sim_strict_core strata_sim_strict_kernels strata_sim_strict)
  target_compile_definitions(${target} PRIVATE STRATA_SIM_STRICT)
endforeach()
target_compile_options(strata_sim_strict_kernels PRIVATE ${STRATA_SIM_INSTRUMENTED})

if(STRATA_TESTS)
  # Every kernel against the CPU on the fast cards, by lanes, so that two processors share the work; a covering set on
  # the strict card; and the detectors on small wrong kernels.
  enable_testing()
  function(strata_sim_test name source core)
    add_executable(${name} ${PROJECT_SOURCE_DIR}/tests/cpp/${source} $<TARGET_OBJECTS:${core}>)
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/cpp)
    target_link_libraries(${name} PRIVATE strata_sim_flags ${STRATA_BOOST_CONTEXT} ${CMAKE_DL_LIBS})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/cpp)
    if(core STREQUAL "strata_sim_strict_core")
      target_compile_definitions(${name} PRIVATE STRATA_SIM_STRICT)
      target_compile_options(${name} PRIVATE ${STRATA_SIM_INSTRUMENTED})
    endif()
  endfunction()
  strata_sim_test(sim_read sim_read.cpp strata_sim_core)
  strata_sim_test(sim_read_strict sim_read.cpp strata_sim_strict_core)
  strata_sim_test(sim_detectors sim_detectors.cpp strata_sim_strict_core)
  strata_sim_test(sim_runtime sim_runtime.cpp strata_sim_core)
  target_sources(sim_read PRIVATE $<TARGET_OBJECTS:strata_cpu_core>)
  target_sources(sim_read_strict PRIVATE $<TARGET_OBJECTS:strata_cpu_core>)
  # The gate, with the build in which faults can be planted.
  add_library(strata_sim_faults OBJECT csrc/sim/kernels.cpp csrc/sim/device.cpp)
  target_link_libraries(strata_sim_faults PUBLIC strata_sim_flags)
  target_compile_definitions(strata_sim_faults PUBLIC STRATA_FAULTS PRIVATE STRATA_BUILT_FOR="simulated cards")
  foreach(name sim_gate sim_errors)
    strata_sim_test(${name} ${name}.cpp strata_sim_core)
    target_link_libraries(${name} PRIVATE strata_sim_faults)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:strata_sim_faults> $<TARGET_OBJECTS:strata_cpu_core>)
    target_compile_definitions(${name} PRIVATE STRATA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  endforeach()
  foreach(part choices faults once)
    add_test(NAME gate_${part} COMMAND sim_gate ${part})
  endforeach()
  # A case takes seconds: all of them once, where all variants run, and every seventh where waves are wider.
  add_test(NAME gate_full_32 COMMAND sim_gate full gfx1201 1)
  add_test(NAME gate_full_64 COMMAND sim_gate full gfx942 7)
  add_test(NAME gate_errors COMMAND sim_errors)
  # The gate's latch under ThreadSanitizer, where its programs run (some kernels place memory where it wants its own).
  include(CheckCXXSourceRuns)
  set(CMAKE_REQUIRED_FLAGS -fsanitize=thread)
  check_cxx_source_runs("int main() { return 0; }" STRATA_THREAD_SANITIZER)
  unset(CMAKE_REQUIRED_FLAGS)
  if(STRATA_THREAD_SANITIZER)
    strata_sim_test(sim_latch sim_latch.cpp strata_cpu_core)
    target_sources(sim_latch PRIVATE ${sim_core} csrc/sim/kernels.cpp csrc/sim/device.cpp)
    target_compile_definitions(sim_latch PRIVATE STRATA_FAULTS STRATA_BUILT_FOR="simulated cards")
    target_compile_options(sim_latch PRIVATE -fsanitize=thread)
    target_link_options(sim_latch PRIVATE -fsanitize=thread)
    add_test(NAME gate_latch COMMAND sim_latch)
  elseif(STRATA_REQUIRE_ALL)
    strata_stop("cannot test the gate's latch: no program of -fsanitize=thread runs here")
  else()
    message(STATUS "left out: the test of the gate's latch (no program of -fsanitize=thread runs here)")
  endif()
  add_test(NAME sim_read_32 COMMAND sim_read 32)
  add_test(NAME sim_read_64 COMMAND sim_read 64)
  add_test(NAME sim_read_strict COMMAND sim_read_strict)
  add_test(NAME sim_traffic COMMAND sim_read_strict traffic)
  add_test(NAME sim_detectors COMMAND sim_detectors)
  add_test(NAME sim_runtime COMMAND sim_runtime)
endif()
