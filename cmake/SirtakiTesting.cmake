# How tests are declared and registered. Labels say what a test needs: unit and inproc nothing, mpi an MPI, torch a
# LibTorch; `ctest -L unit` is the quick one.
include(GoogleTest)

# sirtaki_test_flags(<target>): how tests are compiled.
function(sirtaki_test_flags target)
  sirtaki_compile_fast(${target})
  if(SIRTAKI_SANITIZE MATCHES "undefined")
    # These checks double the time that a test takes to compile, and what is undefined in a test harms nobody.
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
  # Without -Wshadow where several sources are one: what another source of the folder declares is no fault.
  set_target_properties(${target} PROPERTIES SIRTAKI_UNITED_TESTS "${SIRTAKI_UNITY}")
endfunction()

# sirtaki_add_gtest(<name> <label> SOURCES ... LIBRARIES ... [PREFIX <text>] [EACH] [ENVIRONMENT <change>...]): one program. Its
# suites are found when ctest starts, and called PREFIX and their name; EACH: its cases, which may then be skipped one by one.
# ENVIRONMENT: as ENVIRONMENT_MODIFICATION of CMake's, so that what a preset says is added to, not replaced.
function(sirtaki_add_gtest name label)
  cmake_parse_arguments(PARSE_ARGV 2 arg "EACH" "PREFIX" "SOURCES;LIBRARIES;ENVIRONMENT")
  add_executable(${name} ${arg_SOURCES})
  sirtaki_unite_sources(${name} 12)
  sirtaki_test_flags(${name})
  target_link_libraries(${name} PRIVATE sirtaki_flags sirtaki_test_support ${arg_LIBRARIES} GTest::gmock GTest::gtest_main)
  if(arg_EACH)
    gtest_discover_tests(${name}
      DISCOVERY_MODE PRE_TEST
      TEST_PREFIX "${arg_PREFIX}"
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
      PROPERTIES LABELS "${label}" TIMEOUT 300)
    return()
  endif()
  set(file "${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake")
  file(GENERATE OUTPUT "${file}" CONTENT "include(\"${PROJECT_SOURCE_DIR}/cmake/DiscoverSuites.cmake\")
sirtaki_discover_suites(\"$<TARGET_FILE:${name}>\" \"${arg_PREFIX}\" \"${PROJECT_SOURCE_DIR}\" \"${label}\" \"${arg_ENVIRONMENT}\")
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${file}")
endfunction()

# sirtaki_register_mpi_test(<name> <target> RANKS <n>... LABELS <label>... [SOURCE <file>] [ENVIRONMENT <name>=<value>...]): one
# ctest entry a rank count. SOURCE: it runs this file's suites alone.
function(sirtaki_register_mpi_test name target)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "SOURCE" "RANKS;LABELS;ENVIRONMENT")
  set(filter "")
  if(arg_SOURCE)
    file(STRINGS "${arg_SOURCE}" suites REGEX "^TEST(_[FP])?\\(")
    list(TRANSFORM suites REPLACE "^TEST[_FP]*\\(([A-Za-z0-9]+).*" "\\1.*:*/\\1.*")
    list(REMOVE_DUPLICATES suites)
    list(JOIN suites ":" filter)
    set(filter "--gtest_filter=${filter}")
  endif()
  foreach(ranks IN LISTS arg_RANKS)
    set(processors 1)   # ranks wait for each other much of the time
    if(ranks GREATER 4)
      set(processors 2)
    endif()
    add_test(NAME ${name}.ranks_${ranks}
      COMMAND bash "${PROJECT_SOURCE_DIR}/tests/support/mpirun.sh" ${ranks} $<TARGET_FILE:${target}> ${filter}
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
    set_tests_properties(${name}.ranks_${ranks} PROPERTIES
      LABELS "${arg_LABELS};ranks_${ranks}"
      PROCESSORS ${processors}
      TIMEOUT 3000   # mpirun.sh ends the ranks earlier: after SIRTAKI_TEST_SECONDS
      SKIP_RETURN_CODE 77
      ENVIRONMENT "MPIEXEC=${MPIEXEC_EXECUTABLE};${arg_ENVIRONMENT}")
  endforeach()
endfunction()

# sirtaki_add_mpi_tests(<target> PREFIX <word> LABELS <label>... LIBRARIES <library>... SOURCES <file>...): one program, compiled
# at once with SIRTAKI_UNITY, of which each file is a test of its own, called PREFIX and its name. The rank counts stand in the
# files, as `// RANKS: 1 2 3 4`.
function(sirtaki_add_mpi_tests target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PREFIX" "LABELS;LIBRARIES;SOURCES")
  add_executable(${target} ${arg_SOURCES})
  sirtaki_test_flags(${target})
  target_link_libraries(${target} PRIVATE
    sirtaki_flags sirtaki_mpi_test_main sirtaki_test_support ${arg_LIBRARIES} sirtaki_mpi_bindings GTest::gmock GTest::gtest)
  if(SIRTAKI_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  endif()
  foreach(source IN LISTS arg_SOURCES)
    get_filename_component(stem "${source}" NAME_WE)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    file(STRINGS "${source}" line REGEX "^// RANKS:( +[0-9]+)+ *$" LIMIT_COUNT 1)
    if(NOT line)
      message(FATAL_ERROR "${source} does not say on how many ranks it runs: add a line like \"// RANKS: 1 2 3\".")
    endif()
    string(REGEX MATCHALL "[0-9]+" ranks "${line}")
    sirtaki_register_mpi_test(${arg_PREFIX}.${stem} ${target} SOURCE "${source}" RANKS ${ranks} LABELS ${arg_LABELS})
  endforeach()
endfunction()

# sirtaki_add_script_test(<name> LABELS <label>... COMMAND ... [TIMEOUT <seconds>] [JOB] [FULL]): exit code 77 means skipped, its
# reason on the output. JOB: it runs whole jobs, and waits for them most of its time: such tests begin first, two at once, beside
# those that compute. FULL: it is of the second tier, which `ctest -C Full` runs as well (tests/full.sh).
function(sirtaki_add_script_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "JOB;FULL" "TIMEOUT" "LABELS;COMMAND")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  set(tier "")
  if(arg_FULL)
    set(tier CONFIGURATIONS Full)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" ${tier})
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} SKIP_RETURN_CODE 77
    ENVIRONMENT "MPIEXEC=${MPIEXEC_EXECUTABLE};CXX=${CMAKE_CXX_COMPILER};CMAKE=${CMAKE_COMMAND}")
  if(arg_JOB)
    get_property(jobs GLOBAL PROPERTY sirtaki_jobs)
    math(EXPR jobs "(0${jobs} + 1) % 2")
    set_property(GLOBAL PROPERTY sirtaki_jobs ${jobs})
    set_tests_properties(${name} PROPERTIES COST 100 RESOURCE_LOCK jobs_${jobs})
  endif()
endfunction()
